"""Tests and times the Hopper backward kernel: python3 backward_sm90.py check | bench | bench64 | case NAME."""
import ctypes
import json
import math
import os
import random
import statistics
import sys
import time
import traceback
import zlib

import numpy as np
import torch

torch.backends.cuda.matmul.allow_tf32 = False
OUT = os.environ.get('OUT', '.')
LIBRARY = os.environ.get('LIBRARY', 'build/backward_sm90/libbackward_sm90.so')
i32, i64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


# ---- the contract's structures (src/kernels/cuda/{tables,launch}.h)
class TensorRows(ctypes.Structure):
    _fields_ = [('base', pointer), ('batch_step', i64), ('head_step', i64), ('row_step', i64)]


class Channel(ctypes.Structure):
    _fields_ = [('local', TensorRows), ('sources', pointer), ('row_bytes', i64), ('bytes_before', i64),
                ('bytes_all', i64), ('row_offset', i64)]


class DeviceTables(ctypes.Structure):
    _fields_ = [(n, pointer) for n in ('runs', 'groups', 'members', 'repeats', 'items')]


class KernelShape(ctypes.Structure):
    _fields_ = [('dtype', ctypes.c_uint8), ('head_dim', i32), ('scale', ctypes.c_float), ('aligned', ctypes.c_bool),
                ('batch', i64), ('query_tokens', i64), ('key_tokens', i64), ('heads', i32), ('kv_heads', i32)]


class BackwardParams(ctypes.Structure):
    _fields_ = [('shape', KernelShape), ('tables', DeviceTables), ('first_item', i32), ('items', i32)] + [
        (n, Channel) for n in ('q', 'dout', 'lse', 'delta', 'k', 'v', 'dq', 'dk', 'dv')] + [
        ('earlier', pointer), ('dk_out', pointer), ('dv_out', pointer), ('factor', ctypes.c_float), ('filled', i32),  # KeySums
        ('dealt_dq', ctypes.c_bool)]


RUN = np.dtype([(n, 'i4') for n in ('source', 'before', 'count', 'index', 'index_stride', 'stride')] + [('first', 'i8')])
LIST = np.dtype([(n, 'i4') for n in ('begin', 'runs', 'rows', 'ascending', 'by_index')])
GROUP = np.dtype([('queries', LIST), ('keys', LIST)] +
                 [(n, 'i4') for n in ('causal', 'shift', 'first_repeat', 'repeats', 'branch', 'dilation')])
MEMBER = np.dtype([(n, 'i4') for n in ('head', 'kv_head', 'unit')])
REPEAT = np.dtype([(n, 'i4') for n in ('stride', 'phase')])
ITEM = np.dtype([(n, 'i4') for n in ('group', 'member', 'members', 'batch', 'begin', 'rows')])
SOURCE = np.dtype([('base', 'u8'), ('rows', 'i8'), ('units', 'i8')])

_lib = None


def lib():
    global _lib
    if _lib is None:
        _lib = ctypes.CDLL(os.path.abspath(LIBRARY))
        sizes = (ctypes.c_int * 7)()
        _lib.backward_sm90_sizes(sizes)
        mine = [ctypes.sizeof(BackwardParams), ctypes.sizeof(Channel)] + [
            t.itemsize for t in (RUN, GROUP, MEMBER, ITEM, SOURCE)]
        assert list(sizes) == mine, f'the contract has changed: sizes {list(sizes)}, here {mine}'
    return _lib


def to_device(array):
    return torch.from_numpy(np.frombuffer(array.tobytes() or b'\0' * 16, dtype=np.uint8).copy()).cuda()


def blocks_at_once():
    return torch.cuda.get_device_properties(0).multi_processor_count


# ---- tables
class Tables:
    """Groups and items of launches, one for each branch."""

    def __init__(self):
        self.runs, self.groups, self.members, self.repeats, self.items, self.launches = [], [], [], [], [], []
        self.turns = None

    def row_list(self, rows):
        """rows: [(source, first, stride, index, index_stride, count)]"""
        begin, before, last, ascending = len(self.runs), 0, -1 << 40, 1
        for source, first, stride, index, index_stride, count in rows:
            self.runs.append((source, before, count, index, index_stride, stride, first))
            before += count
            ascending &= int(index > last)
            last = index + (count - 1) * index_stride
        return (begin, len(rows), before, ascending, 0)

    def group(self, queries, keys, causal, shift, repeats, dilation, members, batch):
        if not queries or not keys:
            return
        queries, keys = self.row_list(queries), self.row_list(keys)
        first_repeat = len(self.repeats)
        self.repeats += repeats
        number = len(self.groups)
        self.groups.append((queries, keys, int(causal), shift, first_repeat, len(repeats), 0, dilation))
        i = 0
        while i < len(members):  # those of one K/V head together
            j = i
            while j < len(members) and members[j][1] == members[i][1]:
                j += 1
            first = len(self.members)
            self.members += members[i:j]
            for b in range(batch):
                for begin in range(0, keys[2], 128):
                    self.items.append((number, first, j - i, b, begin, min(128, keys[2] - begin)))
            i = j

    def launch(self, row_stride):
        first = self.launches[-1][0] + self.launches[-1][1] if self.launches else 0
        if len(self.items) > first:
            self.launches.append((first, len(self.items) - first, row_stride))

    def in_chains(self, distance, step):
        """For sums of dQ in a fixed order: src/kernels/cuda/chains.h."""
        runs, groups, members, items = [np.array(rows, dtype=dtype) for rows, dtype in (
            (self.runs, RUN), (self.groups, GROUP), (self.members, MEMBER), (self.items, ITEM))]
        launches = np.zeros((len(items), 3), dtype='i4')
        launches[:len(self.launches)] = [(i, first, count) for i, (first, count, _) in enumerate(self.launches)]
        self.turns = np.zeros((len(items), 4), dtype='i4')
        at = [ctypes.c_void_p(x.ctypes.data) for x in (runs, groups, members, items, launches, self.turns)]
        count = lib().backward_sm90_chains(at[0], len(runs), at[1], len(groups), at[2], len(members), at[3], len(items), at[4],
                                           len(self.launches), blocks_at_once(), step, ctypes.c_double(distance), at[5])
        self.items = [tuple(x) for x in items.tolist()]
        self.launches = [(first, items, self.launches[i][2]) for i, first, items in launches[:count].tolist()]

    def finish(self):
        self.device = [to_device(np.array(rows, dtype=dtype)) for rows, dtype in (
            (self.runs, RUN), (self.groups, GROUP), (self.members, MEMBER), (self.repeats, REPEAT), (self.items, ITEM))]
        self.counters = torch.zeros(max(1, len(self.launches)), dtype=torch.int32, device='cuda')
        if self.turns is not None:
            self.device_turns = to_device(self.turns)
            self.counters = torch.zeros(len(self.launches) + 2 * len(self.items), dtype=torch.int32, device='cuda')
        return self


def offset(kind, head, heads, r):
    return head % r if kind == 'interleaved' else head * r // heads


def share_pairs(pattern, kind, head, heads, tokens, shared):
    """[(host, host_rows, [(stride, phase)])] for one head, as src/pattern/shared_pairs.cpp has it."""
    count = len(pattern)
    host, rows, repeats = [-1] * count, [0] * count, [[] for _ in pattern]
    off = [offset(kind, head, heads, r) for w, r in pattern]
    order = sorted(range(count), key=lambda b: (pattern[b][0], pattern[b][1], b))

    def contains(a, b):
        (wa, ra), (wb, rb) = pattern[a], pattern[b]
        return rb % ra == 0 and off[b] % ra == off[a] and wa % rb == 0 and wb % wa == 0

    for gi, g in enumerate(order if shared else []):
        for a in reversed(order[:gi]):
            chain, x = [], a
            while x >= 0:
                chain.append(x)
                x = host[x]
            if not all(contains(x, g) for x in chain) or any(len(repeats[x]) >= 4 for x in chain):
                continue
            host[g], rows[g] = a, pattern[a][0] // pattern[g][1]
            for x in chain:
                repeats[x].append((pattern[g][1] // pattern[x][1], (off[g] - off[x]) // pattern[x][1]))
            break
    return list(zip(host, rows, repeats))


class Storage:
    """Where tokens of one side are: source and position of each, or None: token t is row t of the shard."""

    def __init__(self, tokens, how='plain', chunk=0, seed=0):
        self.how, self.tokens = how, tokens
        self.source = np.full(tokens, -1, dtype=np.int64)
        self.position = np.arange(tokens, dtype=np.int64)
        self.local, self.parcels = tokens, []
        if how == 'plain':
            return
        chunks = [np.arange(a, min(a + chunk, tokens)) for a in range(0, tokens, chunk)]
        rng = np.random.default_rng(seed)
        if how == 'chunks':  # the shard keeps chunks in another order
            order = np.concatenate([chunks[i] for i in rng.permutation(len(chunks))])
            self.position[order] = np.arange(tokens)
        else:  # 'parcels': every third chunk is here, the others are in two parcels
            counts = [0, 0, 0]
            for i, c in enumerate(chunks):
                where = i % 3
                self.source[c] = where - 1
                self.position[c] = counts[where] + np.arange(len(c))
                counts[where] += len(c)
            self.local, self.parcels = counts[0], counts[1:]

    def runs(self, first, stride, count, index, order='index'):
        """Tokens first + i * stride with indices index + i, as runs."""
        if count <= 0:
            return []
        if self.how == 'plain':
            return [(-1, first, stride, index, 1, count)]
        tokens = first + np.arange(count) * stride
        indices = index + np.arange(count)
        if order == 'store':
            by = np.lexsort((self.position[tokens], self.source[tokens]))
            tokens, indices = tokens[by], indices[by]
        src, pos, runs, i = self.source[tokens], self.position[tokens], [], 0
        while i < count:
            j, ps, xs = i + 1, 1, 1
            if j < count and src[j] == src[i] and pos[j] > pos[i] and indices[j] > indices[i]:
                ps, xs = int(pos[j] - pos[i]), int(indices[j] - indices[i])
                while j < count and src[j] == src[i] and pos[j] - pos[j - 1] == ps and indices[j] - indices[j - 1] == xs:
                    j += 1
            runs.append((int(src[i]), int(pos[i]), ps, int(indices[i]), xs, j - i))
            i = j
        return runs


def make_tables(tokens, pattern, heads, kv_heads, batch, causal, shift=0, shared=False, kind='blocked', queries=None,
                keys=None, order='index', boxes=True, distance=None, step=64):
    queries, keys = queries or Storage(tokens), keys or Storage(tokens)
    tables = Tables()
    plans = [share_pairs(pattern, kind, h, heads, tokens, shared) for h in range(heads)]
    for b, (w, r) in sorted(enumerate(pattern), key=lambda x: -x[1][1]):
        alike = {}
        for h in range(heads):
            host, rows, repeats = plans[h][b]
            key = (offset(kind, h, heads, r), rows if host >= 0 else 0, tuple(repeats))
            alike.setdefault(key, []).append((h, h * kv_heads // heads, h if queries.parcels else h * kv_heads // heads))
        for start in range(0, tokens, w):
            for (o, window, repeats), members in alike.items():
                length = min(w, tokens - start)
                s = (length - o + r - 1) // r
                shift_here = shift // r  # rounds down
                def pick(storage, a, z):
                    a, z = max(a, 0), min(z, s)
                    return storage.runs(start + o + a * r, r, z - a, a, order)
                rest = (causal, shift_here, list(repeats), r, members, batch)
                if window == 0:
                    tables.group(pick(queries, 0, s), pick(keys, 0, s), *rest)
                else:
                    for a in range(0, s, window):
                        z = a + window
                        before = [] if causal else pick(queries, 0, a)
                        tables.group(before + pick(queries, z, s), pick(keys, a, z), *rest)
        tables.launch(r if boxes else 0)
    if distance is not None:
        tables.in_chains(distance, step)
    return tables.finish()


# ---- calls
def rows_of(t, skip=0):
    """[batch][token][head][...]"""
    e = t.element_size()
    return TensorRows(t.data_ptr() + skip, t.stride(0) * e, t.stride(2) * e, t.stride(1) * e)


def channel(t, skip=0):
    return Channel(rows_of(t, skip), None, 0, 0, 0, 0)


def backward(tables, tensors, dim, dtype, heads, kv_heads, batch, query_tokens, key_tokens, dynamic=True, scale=None, dealt=False):
    p = BackwardParams()
    p.shape = KernelShape({torch.bfloat16: 1, torch.float16: 2}[dtype], dim, scale or 1 / math.sqrt(dim), True, batch,
                          query_tokens, key_tokens, heads, kv_heads)
    p.tables = DeviceTables(*[t.data_ptr() for t in tables.device])
    for name, c in tensors.items():
        setattr(p, name, c)
    p.dealt_dq = dealt
    message = ctypes.create_string_buffer(500)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    if dynamic:
        tables.counters.zero_()
    for i, (first, items, row_stride) in enumerate(tables.launches):
        p.first_item, p.items = first, items
        counter = ctypes.c_void_p(tables.counters.data_ptr() + 4 * i) if dynamic else None
        turns = progress = None
        if tables.turns is not None:
            turns = ctypes.c_void_p(tables.device_turns.data_ptr())
            progress = ctypes.c_void_p(tables.counters.data_ptr() + 4 * len(tables.launches))
        rc = lib().backward_sm90(ctypes.byref(p), row_stride, counter, turns, progress, stream, message, 500)
        if rc:
            raise RuntimeError(f'launch {i}: {message.value.decode()}')


# ---- correctness
def weights(tokens, pattern, kind, head, heads, causal, shift):
    t = torch.arange(tokens, device='cuda')
    m = torch.zeros(tokens, tokens, device='cuda', dtype=torch.float64)
    for w, r in pattern:
        o = offset(kind, head, heads, r)
        chosen = (t % w) % r == o
        m += (chosen[:, None] & chosen[None, :] & ((t // w)[:, None] == (t // w)[None, :])).double()
    if causal:
        m *= t[None, :] <= t[:, None] + shift
    return m


def reference(q, k, v, go, pattern, kind, causal, shift, scale):
    """fp64, every allowed pair as often as branches have it; rows that see nothing have L = -inf."""
    batch, tokens, heads, dim = q.shape
    group = heads // k.shape[2]
    lse = torch.empty(batch, tokens, heads, device='cuda', dtype=torch.float64)
    delta = torch.empty_like(lse)
    g = [torch.zeros(t.shape, device='cuda', dtype=torch.float64) for t in (q, k, v)]
    for h in range(heads):
        m = weights(tokens, pattern, kind, h, heads, causal, shift)
        for b in range(batch):
            Q, G = q[b, :, h].double().nan_to_num(0), go[b, :, h].double().nan_to_num(0)
            K, V = k[b, :, h // group].double().nan_to_num(0), v[b, :, h // group].double().nan_to_num(0)
            s = Q @ K.T * scale
            L = torch.logsumexp(s + torch.log(m), -1)
            p = torch.where(m > 0, m * torch.exp(s - L[:, None]), 0.0)
            D = ((p @ V) * G).sum(-1)
            ds = p * (G @ V.T - D[:, None]) * scale
            g[0][b, :, h] = ds @ K
            g[1][b, :, h // group] += ds.T @ Q
            g[2][b, :, h // group] += p.T @ G
            lse[b, :, h], delta[b, :, h] = L, D
    return lse, delta, g


def dealt_column(column):  # src/kernels/cuda/launch.h
    return column // 32 * 32 + column % 8 // 2 * 8 + column // 16 % 2 * 4 + column // 8 % 2 * 2 + column % 2


def rel(a, b):
    return ((a.double() - b).norm() / b.norm()).item()


def worst_row(a, b):
    """Largest error of a row against its own length, short rows counting as a tenth of the usual one."""
    e, n = (a.double() - b).norm(dim=-1), b.norm(dim=-1)
    return (e / (n + 0.1 * n.square().mean().sqrt())).max().item()


def split(t, storage, fill=float('nan')):
    """A tensor of all tokens as the shard's rows and parcels [batch][unit][row]."""
    local = torch.full((t.shape[0], storage.local) + t.shape[2:], fill, device='cuda', dtype=t.dtype)
    parcels = [torch.full((t.shape[0], t.shape[2], n) + t.shape[3:], fill, device='cuda', dtype=t.dtype)
               for n in storage.parcels]
    source, position = torch.from_numpy(storage.source).cuda(), torch.from_numpy(storage.position).cuda()
    local[:, position[source < 0]] = t[:, source < 0]
    for i, x in enumerate(parcels):
        x[:, :, position[source == i]] = t[:, source == i].transpose(1, 2)
    return local, parcels


def join(local, parcels, storage):
    whole = torch.empty((local.shape[0], storage.tokens) + local.shape[2:], device='cuda', dtype=local.dtype)
    source, position = torch.from_numpy(storage.source).cuda(), torch.from_numpy(storage.position).cuda()
    whole[:, source < 0] = local[:, position[source < 0]]
    for i, x in enumerate(parcels):
        whole[:, source == i] = x[:, :, position[source == i]].transpose(1, 2)
    return whole


KEEP = []


def split_channel(local, parcels, skip=0):
    c = channel(local, skip)
    if parcels:
        row = parcels[0].stride(2) * parcels[0].element_size()
        sources = np.array([(x.data_ptr(), x.shape[2], x.shape[1]) for x in parcels], dtype=SOURCE)
        KEEP.append(to_device(sources))
        c.sources, c.row_bytes, c.bytes_before, c.bytes_all, c.row_offset = KEEP[-1].data_ptr(), row, 0, row, skip
    return c


CASES = {}


def case(name, **options):
    CASES[name] = options


SMALL = [(256, 1), (512, 2), (1024, 4)]
NEST = [(128, 1), (256, 2), (512, 4), (1024, 8), (2048, 16)]
for dim in (128, 64):
    for causal in (False, True):
        d = f'd{dim}_{"causal" if causal else "full"}'
        base = dict(dim=dim, causal=causal)
        case(f'dense512_{d}', tokens=512, pattern=[(512, 1)], cudnn=True, **base)
        case(f'dense1152_{d}_static', tokens=1152, pattern=[(1152, 1)], cudnn=True, dynamic=False, **base)
        case(f'tiny70_{d}', tokens=70, pattern=[(70, 1)], cudnn=True, **base)
        case(f'ragged1000_{d}_batch2', tokens=1000, pattern=[(1000, 1)], batch=2, cudnn=True, **base)
        case(f'ragged_segments_{d}', tokens=901, pattern=[(300, 1)], batch=2, **base)
        case(f'longnet_{d}', tokens=2048, pattern=SMALL, heads=4, **base)
        case(f'longnet_{d}_shared', tokens=2048, pattern=SMALL, heads=4, shared=True, **base)
        case(f'gathered_{d}_shared', tokens=2048, pattern=SMALL, heads=4, shared=True, boxes=False, **base)
        case(f'gqa_{d}', tokens=1024, pattern=[(512, 1), (1024, 2)], heads=8, kv_heads=2, batch=2, **base)
        case(f'odd_dilations_{d}', tokens=1500, pattern=[(300, 1), (900, 3), (1500, 5)], heads=5, **base)
for causal in (False, True):
    d = 'd128_' + ('causal' if causal else 'full')
    base = dict(dim=128, causal=causal)
    case(f'nested_{d}_shared', tokens=4096, pattern=NEST, heads=16, shared=True, **base)
    case(f'nested_{d}_shared_interleaved', tokens=2048, pattern=NEST, heads=8, shared=True, kind='interleaved', **base)
    case(f'odd_dilations_{d}_shared', tokens=1800, pattern=[(300, 1), (900, 3), (1800, 6)], heads=3, shared=True, kind='interleaved', **base)
    case(f'ragged_{d}_shared', tokens=1777, pattern=[(240, 1), (480, 2), (960, 4)], heads=4, shared=True, **base)
    case(f'chunks_{d}', tokens=1024, pattern=[(512, 1), (1024, 2)], heads=2, queries=('chunks', 200), keys=('chunks', 150), **base)
    case(f'chunks_{d}_store_order', tokens=1024, pattern=[(1024, 1)], heads=2, queries=('chunks', 192), keys=('chunks', 150), order='store', **base)
    case(f'chunks_{d}_shared', tokens=1024, pattern=[(256, 1), (1024, 4)], heads=4, shared=True, queries=('chunks', 256), keys=('chunks', 128), **base)
    case(f'parcel_keys_{d}', tokens=1024, pattern=[(512, 1), (1024, 2)], heads=4, kv_heads=2, batch=2, keys=('parcels', 192), **base)
    case(f'parcel_queries_{d}', tokens=1024, pattern=[(512, 1), (1024, 2)], heads=4, batch=2, queries=('parcels', 192), **base)
    case(f'fp16_{d}', tokens=1024, pattern=[(1024, 1)], dtype=torch.float16, cudnn=True, **base)
    case(f'fp16_{d}_longnet_shared', tokens=2048, pattern=SMALL, heads=4, shared=True, dtype=torch.float16, **base)
    case(f'nan_{d}', tokens=1024, pattern=[(512, 2)], heads=2, kind='alone', nan=True, padded=24, **base)
    case(f'nan_{d}_ragged', tokens=900, pattern=[(700, 3)], heads=3, kind='alone', nan=True, padded=8, **base)
case('fp16_d64_full', tokens=1024, pattern=[(1024, 1)], dtype=torch.float16, dim=64, cudnn=True)
case('fp16_d64_causal', tokens=1024, pattern=[(1024, 1)], dtype=torch.float16, dim=64, causal=True, cudnn=True)
case('shift_back', tokens=700, pattern=[(700, 1)], causal=True, shift=-150)
case('shift_forward', tokens=700, pattern=[(700, 1)], causal=True, shift=90)
case('many_items', tokens=8192, pattern=[(256, 1)], heads=8)
case('many_items_causal', tokens=8192, pattern=[(512, 1)], heads=8, causal=True)


def cudnn_forward(a, causal):
    return torch.ops.aten._scaled_dot_product_cudnn_attention(a[0], a[1], a[2], None, True, 0.0, causal, False)


def cudnn_backward(go, a, x, causal):
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        go, a[0], a[1], a[2], x[0], x[1], x[6], x[7], None, x[2], x[3], x[4], x[5], 0.0, causal)


def cudnn_errors(q, k, v, go, causal, want):
    try:
        a = [t.transpose(1, 2) for t in (q, k, v, go)]
        g = cudnn_backward(a[3], a, cudnn_forward(a, causal), causal)
        return [rel(x.transpose(1, 2), y) for x, y in zip(g, want)]
    except Exception as error:  # an opinion more, not a test
        return str(error)[:80]


def check(name, tokens, pattern, dim=128, causal=False, heads=2, kv_heads=None, batch=1, dtype=torch.bfloat16, shared=False,
          kind='blocked', queries=None, keys=None, order='index', boxes=True, dynamic=True, shift=0, nan=False, padded=0,
          cudnn=False):
    global offset
    kv_heads = kv_heads or heads
    torch.manual_seed(zlib.crc32(name.encode()))
    KEEP.clear()
    alone = kind == 'alone'  # every head takes the same offset, so that some rows are nobody's
    usual = offset
    if alone:
        offset = lambda kind, head, heads, r: min(1, r - 1)
    try:
        def make(count):
            wide = torch.randn(batch, tokens, count, dim + padded, device='cuda').to(dtype)
            if padded:
                wide[..., dim:] = float('nan')
            t = wide[..., :dim]
            if nan:
                rows = torch.arange(tokens, device='cuda')
                w, r = pattern[0]
                t[:, (rows % w) % r != min(1, r - 1)] = float('nan')
            return t
        q, go = make(heads), make(heads)
        k, v = make(kv_heads), make(kv_heads)
        scale = 1 / math.sqrt(dim)
        lse, delta, want = reference(q, k, v, go, pattern, kind, causal, shift, scale)
        Q = Storage(tokens, *(queries or ('plain',)), seed=1)
        K = Storage(tokens, *(keys or ('plain',)), seed=2)
        tables = make_tables(tokens, pattern, heads, kv_heads, batch, causal, shift, shared, kind, Q, K, order, boxes)
        stats = torch.stack([lse, delta], -1).float().contiguous()
        if nan:
            stats = torch.where(torch.isinf(stats[..., :1]), float('nan'), stats)
        sums = [torch.randn(t.shape, device='cuda') for t in want]

        def run(tables, dealt=False):
            stored = {}
            tensors = {}
            for n, t, s in (('q', q, Q), ('dout', go, Q), ('k', k, K), ('v', v, K), ('dq', sums[0], Q), ('dk', sums[1], K), ('dv', sums[2], K)):
                stored[n] = split(t, s) if s.how != 'plain' else (t if n[0] != 'd' or n == 'dout' else t.clone(), [])
                tensors[n] = split_channel(*stored[n])
            stored['stats'] = split(stats, Q) if Q.how != 'plain' else (stats, [])
            tensors['lse'], tensors['delta'] = split_channel(*stored['stats']), split_channel(*stored['stats'], skip=4)
            for c in (tensors['lse'], tensors['delta']):
                c.local.head_step, c.local.row_step = 8, 8 * heads
            backward(tables, tensors, dim, dtype, heads, kv_heads, batch, Q.local, K.local, dynamic or tables.turns is not None, scale,
                     dealt=dealt)
            torch.cuda.synchronize()
            return [join(*stored[n], s) if s.how != 'plain' else stored[n][0] for n, s in (('dq', Q), ('dk', K), ('dv', K))]

        got = run(tables)
        dealt = run(tables, True)[0] - sums[0]  # the same sums in another order of columns
        dealt = rel(dealt[..., [dealt_column(c) for c in range(dim)]], (got[0] - sums[0]).double())
        # In order: the same bits every time, and however many chains run side by side; and as near to the truth.
        ordered = [run(make_tables(tokens, pattern, heads, kv_heads, batch, causal, shift, shared, kind, Q, K, order, boxes, distance, 64 if dim == 128 else 128))
                   for distance in (0, 0, 4, 1000)]
        same = all(torch.equal(x, y) for other in ordered[1:] for x, y in zip(ordered[0], other))
        got = [x.double() - s.double() for x, s in zip(got, sums)]
        errors = [max(rel(x, y), rel(z.double() - s.double(), y)) for x, y, z, s in zip(got, want, ordered[0], sums)]
        rows = [max(worst_row(x, y), worst_row(z.double() - s.double(), y)) for x, y, z, s in zip(got, want, ordered[0], sums)]
        bound = 6e-3 if dtype == torch.bfloat16 else 1.2e-3
        ok = same and dealt < 1e-4 and all(e < bound for e in errors) and all(e < 12 * bound for e in rows)
        line = f'{"ok  " if ok else "FAIL"} {"" if same else "NOT THE SAME BITS "}{"" if dealt < 1e-4 else f"DEALT {dealt:.1e} "}{name:42s} ' + ' '.join(f'{n} {e:.2e} ({w:.1e})' for n, e, w in zip(('dq', 'dk', 'dv'), errors, rows))
        if cudnn:
            c = cudnn_errors(q, k, v, go, causal, want)
            line += ' | cudnn ' + (c if isinstance(c, str) else ' '.join(f'{e:.2e}' for e in c))
        print(line, flush=True)
        if not ok:
            for n, x, y in zip(('dq', 'dk', 'dv'), got, want):
                e = (x - y).norm(dim=-1) / (y.norm(dim=-1) + 0.1 * y.norm(dim=-1).square().mean().sqrt())
                bad = ~(e < 12 * bound)
                if bad.any():
                    b, t, h = bad.nonzero().T
                    print(f'     {n}: {int(bad.sum())} of {bad.numel()} rows, first (batch, token, head) '
                          f'{[(int(b[i]), int(t[i]), int(h[i])) for i in range(min(6, len(b)))]}, tokens {int(t.min())}..{int(t.max())}, '
                          f'NaN {int(torch.isnan(x).sum())}, ratio of norms {(x.nan_to_num(0).norm() / y.norm()).item():.3f}')
        return ok, errors
    finally:
        offset = usual


def check_all(names):
    start, bad, results = time.time(), [], {}
    for name in names:
        try:
            ok, errors = check(name, **CASES[name])
            results[name] = errors
            if not ok:
                bad.append(name)
        except Exception as error:
            bad.append(name)
            print(f'FAIL {name}: {error!r}'[:300], flush=True)
            traceback.print_exc(limit=3)
            if 'CUDA error' in str(error) or 'cuda' in type(error).__name__.lower():
                print('the context is lost: stopping', flush=True)
                break
    json.dump(dict(errors=results, bad=bad), open(OUT + '/backward_sm90_check.json', 'w'))
    print(f'{len(results)} of {len(names)} ran, {len(bad)} bad: {bad} ({time.time() - start:.0f} s)', flush=True)
    return not bad


# ---- times
H = 16
LONGNET = [(2048, 1), (4096, 2), (8192, 4), (16384, 8), (32768, 16)]
RESULTS = []


def flops(tokens, pattern, causal, dim):
    return sum(10.0 * dim * (tokens // w) * H * ((w // r) ** 2 if not causal else (w // r) * (w // r + 1) / 2) for w, r in pattern)


def shuffled(functions, rounds, least_ms=80.0):
    counts = {}
    for n, f in functions.items():
        f()
        torch.cuda.synchronize()
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        f()
        b.record()
        torch.cuda.synchronize()
        counts[n] = max(1, math.ceil(least_ms / a.elapsed_time(b)))
    times = {n: [] for n in functions}
    for _ in range(rounds):
        order = list(functions.items())
        random.shuffle(order)
        for n, f in order:
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            for _ in range(counts[n]):
                f()
            b.record()
            torch.cuda.synchronize()
            times[n].append(a.elapsed_time(b) / counts[n])
    return times


def show(title, times, work):
    print('--- ' + title)
    base = statistics.median(next(t for n, t in times.items() if n.startswith('cudnn')))
    for n, t in times.items():
        m = statistics.median(t)
        print(f'{n:34s} {m:9.3f} ms ({min(t):.3f}..{max(t):.3f}) {work / m / 1e9:6.0f} TF  cudnn/this {base / m:.3f}', flush=True)
        RESULTS.append(dict(case=title, what=n, ms=m, low=min(t), high=max(t), tflops=work / m / 1e9, ratio=base / m))
    json.dump(RESULTS, open(OUT + '/backward_sm90_bench.json', 'w'), indent=1)


class Own:
    def __init__(self, q, k, v, go, out, lse, tables, dim):
        tokens = q.shape[1]
        self.out, self.go, self.dim, self.tokens, self.tables = out, go, dim, tokens, tables
        self.sums = [torch.zeros(1, tokens, H, dim, device='cuda') for _ in range(3)]
        self.final = [torch.empty(1, tokens, H, dim, device='cuda', dtype=q.dtype) for _ in range(3)]
        self.stats = torch.empty(1, tokens, H, 2, device='cuda')
        self.stats[..., 0] = lse
        self.stats[..., 1] = (out.float() * go.float()).sum(-1)
        names = ('q', 'dout', 'k', 'v', 'dq', 'dk', 'dv')
        self.tensors = {n: channel(t) for n, t in zip(names, (q, go, k, v, *self.sums))}
        self.tensors['lse'], self.tensors['delta'] = channel(self.stats), channel(self.stats, 4)
        for c in (self.tensors['lse'], self.tensors['delta']):
            c.local.head_step, c.local.row_step = 8, 8 * H
        self.keep = (q, k, v, go)
        self.dtype = q.dtype

    def main(self, dynamic=True):
        backward(self.tables, self.tensors, self.dim, self.dtype, H, H, 1, self.tokens, self.tokens, dynamic)

    def total(self):
        """With zeros and rounding by torch."""
        for t in self.sums:
            t.zero_()
        self.main()
        for s, f in zip(self.sums, self.final):
            f.copy_(s)


def inputs(tokens, dim, dtype=torch.bfloat16):
    torch.manual_seed(1)
    return [torch.randn(1, tokens, H, dim, device='cuda', dtype=dtype) for _ in range(4)]


def dense(lengths, dim, rounds, tokens=65536):
    for causal in (False, True):
        for s in lengths:
            q, k, v, go = inputs(tokens, dim)
            a = [t.view(tokens // s, s, H, dim).transpose(1, 2) for t in (q, k, v, go)]
            x = cudnn_forward(a, causal)
            out = x[0].transpose(1, 2).reshape(1, tokens, H, dim).contiguous()
            lse = x[1].reshape(tokens // s, H, s).transpose(1, 2).reshape(1, tokens, H)
            own = Own(q, k, v, go, out, lse, make_tables(tokens, [(s, 1)], H, H, 1, causal), dim)
            own.total()
            g = cudnn_backward(a[3], a, x, causal)
            apart = [rel(f, y.transpose(1, 2).reshape(1, tokens, H, dim).double()) for f, y in zip(own.final, g)]
            print('own against cudnn: ' + ' '.join(f'{e:.2e}' for e in apart), flush=True)
            functions = {'cudnn': lambda: cudnn_backward(a[3], a, x, causal), 'own main': own.main,
                         'own main, items in turn': lambda: own.main(False), 'own total (torch zero, round)': own.total}
            show(f'dense {s}, {tokens} tokens, dim {dim}, {"causal" if causal else "full"}', shuffled(functions, rounds),
                 flops(tokens, [(s, 1)], causal, dim))


def longnet(tokens, dim, rounds):
    for causal in (False, True):
        q, k, v, go = inputs(tokens, dim)
        out = (torch.randn(1, tokens, H, dim, device='cuda') * 0.03).to(q.dtype)
        lse = torch.full((1, tokens, H), math.log(2048) + 0.6 - (0.5 if causal else 0), device='cuda')
        functions = {}
        calls = []
        for w, r in LONGNET:
            s, n, heads = w // r, tokens // w, H // r
            for o in range(r):
                a = [t.view(n, s, r, H, dim)[:, :, o, o * heads:(o + 1) * heads].transpose(1, 2) for t in (q, k, v, go)]
                x = cudnn_forward(a, causal)
                calls.append((a, x, torch.empty_like(x[0]).copy_(a[3])))
        functions['cudnn, no accumulation'] = lambda: [cudnn_backward(g, a, x, causal) for a, x, g in calls]
        plain = Own(q, k, v, go, out, lse, make_tables(tokens, LONGNET, H, H, 1, causal), dim)
        functions['own main'] = plain.main
        functions['own total (torch zero, round)'] = plain.total
        shared = Own(q, k, v, go, out, lse, make_tables(tokens, LONGNET, H, H, 1, causal, shared=True), dim)
        functions['own main, shared pairs'] = shared.main
        functions['own main, shared, interleaved'] = Own(
            q, k, v, go, out, lse, make_tables(tokens, LONGNET, H, H, 1, causal, shared=True, kind='interleaved'), dim).main
        for b, (w, r) in enumerate(LONGNET):
            one = Own.__new__(Own)
            one.__dict__.update(plain.__dict__)
            one.tables = make_tables(tokens, [(w, r)], H, H, 1, causal)
            functions[f'own branch r={r}'] = one.main
        title = f'LongNet {tokens} tokens, dim {dim}, {"causal" if causal else "full"}'
        times = shuffled(functions, rounds)
        show(title, times, flops(tokens, LONGNET, causal, dim))
        for w, r in LONGNET:
            m = statistics.median(times[f'own branch r={r}'])
            print(f'   r={r}: {flops(tokens, [(w, r)], causal, dim) / m / 1e9:.0f} TF')
        del functions, calls, plain, shared
        torch.cuda.empty_cache()


def attempt(function, *arguments):
    start = time.time()
    try:
        function(*arguments)
    except Exception as error:
        print(f'FAILED {function.__name__}{arguments}: {error!r}'[:600], flush=True)
    print(f'   [{function.__name__}{arguments} {time.time() - start:.0f} s]', flush=True)


def main():
    what = sys.argv[1] if len(sys.argv) > 1 else 'check'
    if what == 'check':
        sys.exit(0 if check_all(list(CASES)) else 1)
    if what == 'case':
        sys.exit(0 if check_all([n for n in CASES if any(n.startswith(x) for x in sys.argv[2:])]) else 1)
    dim = 64 if what == 'bench64' else 128
    attempt(dense, [2048, 4096, 16384], dim, 7)
    attempt(longnet, 262144, dim, 5)


if __name__ == '__main__':
    main()
