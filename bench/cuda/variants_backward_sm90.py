"""Checks and times variants of the Hopper backward kernel: see variants_backward_sm90.sh."""
import csv
import ctypes
import math
import os
import statistics
import sys
import threading
import time

BUILT = os.environ.get('BUILT', 'build/variants_sm90')
PROTOTYPE = os.environ.get('PROTOTYPE', '')
CASES = ['dense512_d128_causal', 'ragged1000_d128_full_batch2', 'longnet_d128_causal_shared', 'nested_d128_full_shared',
         'chunks_d128_causal', 'parcel_queries_d128_full', 'shift_back', 'gqa_d128_causal', 'many_items', 'nan_d128_causal_ragged']
dim = 128


def names():
    return [line.split()[0] for line in open(f'{BUILT}/names') if os.path.exists(f'{BUILT}/{line.split()[0]}.so')]


def setup():
    global B, torch, H
    import torch
    import backward_sm90 as B
    H = B.H
    B.LIBRARY = f'{BUILT}/{names()[0]}.so'
    libraries = {}
    for n in names():
        B._lib, B.LIBRARY = None, f'{BUILT}/{n}.so'
        libraries[n] = B.lib()
    return libraries


def prototype(tokens, s, causal, q, k, v, go, out, lse):
    if not os.path.exists(f'{BUILT}/prototype.so'):
        return None
    sys.path.insert(0, PROTOTYPE)
    import bench_bwd
    bench_bwd.LIBS['own'] = ctypes.CDLL(os.path.abspath(f'{BUILT}/prototype.so'))
    flat = [t.view(tokens, H, dim) for t in (q, k, v, go, out)]
    own = bench_bwd.Own('own', tokens, [(s, 1)])
    own.pre(flat[4], flat[3], lse.view(tokens, H).t().contiguous())
    return lambda: own.main(causal, *flat[:4])


def dense(tokens, s, causal):
    q, k, v, go = B.inputs(tokens, dim)
    a = [t.view(tokens // s, s, H, dim).transpose(1, 2) for t in (q, k, v, go)]
    x = B.cudnn_forward(a, causal)
    out = x[0].transpose(1, 2).reshape(1, tokens, H, dim).contiguous()
    lse = x[1].reshape(tokens // s, H, s).transpose(1, 2).reshape(1, tokens, H)
    own = B.Own(q, k, v, go, out, lse, B.make_tables(tokens, [(s, 1)], H, H, 1, causal), dim)
    return own, lambda: B.cudnn_backward(a[3], a, x, causal), prototype(tokens, s, causal, q, k, v, go, out, lse)


def longnet(tokens, causal):
    q, k, v, go = B.inputs(tokens, dim)
    out = (torch.randn(1, tokens, H, dim, device='cuda') * 0.03).to(q.dtype)
    lse = torch.full((1, tokens, H), math.log(2048) + 0.6 - (0.5 if causal else 0), device='cuda')
    calls = []
    for w, r in B.LONGNET:
        s, n, heads = w // r, tokens // w, H // r
        for o in range(r):
            a = [t.view(n, s, r, H, dim)[:, :, o, o * heads:(o + 1) * heads].transpose(1, 2) for t in (q, k, v, go)]
            x = B.cudnn_forward(a, causal)
            calls.append((a, x, torch.empty_like(x[0]).copy_(a[3])))
    own = B.Own(q, k, v, go, out, lse, B.make_tables(tokens, B.LONGNET, H, H, 1, causal, shared=True), dim)
    return own, lambda: [B.cudnn_backward(g, a, x, causal) for a, x, g in calls], None


def check(name):
    B._lib = setup()[name]
    return B.check_all(CASES)


def run(rounds):
    start = time.time()
    libraries = setup()
    table = {}
    titles = []

    def show():
        print('cuDNN time / this, TFLOP/s')
        print(f'{"":10s}' + ''.join(f'{t:>13s}' for t in titles))
        for n, row in list(table.items()):
            print(f'{n:10s}' + ''.join(f'{row.get(t, ""):>13s}' for t in titles), flush=True)

    def give_up():  # a kernel hangs
        print('gave up', flush=True)
        show()
        os._exit(1)
    watch = threading.Timer(90, give_up)
    watch.daemon = True
    watch.start()
    for title, make, work in (
            ('d16384', lambda: dense(65536, 16384, False), B.flops(65536, [(16384, 1)], False, dim)),
            ('d16384c', lambda: dense(65536, 16384, True), B.flops(65536, [(16384, 1)], True, dim)),
            ('d2048', lambda: dense(65536, 2048, False), B.flops(65536, [(2048, 1)], False, dim)),
            ('d2048c', lambda: dense(65536, 2048, True), B.flops(65536, [(2048, 1)], True, dim)),
            ('ln256k', lambda: longnet(262144, False), B.flops(262144, B.LONGNET, False, dim)),
            ('ln256kc', lambda: longnet(262144, True), B.flops(262144, B.LONGNET, True, dim))):
        try:
            own, cudnn, proto = make()

            def call(library):
                B._lib = library
                own.main()
            functions = {'cudnn': cudnn, **{n: (lambda x=x: call(x)) for n, x in libraries.items()}}
            if proto is not None:
                functions['prototype'] = proto
            times = {n: statistics.median(t) for n, t in B.shuffled(functions, rounds).items()}
            titles.append(title)
            for n, t in times.items():
                table.setdefault(n, {})[title] = f'{times["cudnn"] / t:.3f} {work / t / 1e9:4.0f}'
        except Exception as error:
            print(f'FAILED {title}: {error!r}'[:400], flush=True)
        own = cudnn = proto = functions = None
        torch.cuda.empty_cache()
    watch.cancel()
    show()
    print(f'[{time.time() - start:.0f} s]', flush=True)


def once(name):
    libraries = setup()
    own, _, proto = dense(32768, 16384, False)
    torch.cuda.synchronize()
    if name == 'prototype':
        proto()
    else:
        B._lib = libraries[name]
        own.main()
    torch.cuda.synchronize()


def profile(path):
    rows = list(csv.reader(open(path + '.raw.csv')))
    rows = rows[next(i for i, r in enumerate(rows) if len(r) > 10):]
    print(f'== {os.path.basename(path)}')
    for n, unit, value in zip(rows[0], rows[1], rows[2]):
        if n in ('gpu__time_duration.sum', 'smsp__inst_executed.sum', 'smsp__inst_issued.sum', 'smsp__cycles_active.avg') or any(
                x in n for x in ('throughput.avg.pct', 'issue_stalled', 'pipe_tensor', 'l1tex__data_pipe', 'data_bank', 'lts__t_sectors_op',
                                 'issue_active')):
            print(f'   {n} {value} {unit}')
    rows = list(csv.reader(open(path + '.source.csv')))
    top = next(i for i, r in enumerate(rows) if len(r) > 10)
    head, rows = rows[top], [r for r in rows[top + 1:] if len(r) == len(rows[top])]
    at = next(i for i, n in enumerate(head) if 'Samples' in n or 'Sampling' in n)
    text = next(i for i, n in enumerate(head) if n.strip() == 'Source')

    def number(x):
        try:
            return int(float(x.replace(',', '')))
        except ValueError:
            return 0
    samples = [number(r[at]) for r in rows]
    total = sum(samples) or 1
    print(f'   {head[at]}: {total}; lines of more than 0.7 %:')
    for i, s in enumerate(samples):
        if s > 0.007 * total:
            print(f'   {i:5d} {100 * s / total:5.1f} %  {rows[i][text][:90]}')


if __name__ == '__main__':
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    if sys.argv[1] == 'time':
        run(5)
    elif sys.argv[1] == 'check':
        sys.exit(0 if check(sys.argv[2]) else 1)
    elif sys.argv[1] == 'once':
        once(sys.argv[2])
    else:
        profile(sys.argv[2])
