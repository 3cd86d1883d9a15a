#!/usr/bin/env python3
"""Checks and times the Hopper forward kernels, without the planner: tables are made here.

  bash bench/cuda/build_forward_sm90.sh
  python3 bench/cuda/forward_sm90.py                 # everything, in processes of their own
  python3 bench/cuda/forward_sm90.py check NAME...   # some checks, here
  python3 bench/cuda/forward_sm90.py bench           # times, here
  python3 bench/cuda/forward_sm90.py host            # what needs no device

Results also go to $OUT/forward_sm90.json.
"""
import ctypes
import json
import math
import os
import subprocess
import sys
import time

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
LIBRARY = os.environ.get("LIB", os.path.join(HERE, "../../build/forward_sm90/libforward_sm90.so"))
TILE = 128

RUN = np.dtype([("source", "i4"), ("before", "i4"), ("count", "i4"), ("index", "i4"),
                ("index_stride", "i4"), ("stride", "i4"), ("first", "i8")])
GROUP = np.dtype([("q_begin", "i4"), ("q_runs", "i4"), ("q_rows", "i4"), ("q_ascending", "i4"), ("q_by_index", "i4"),
                  ("k_begin", "i4"), ("k_runs", "i4"), ("k_rows", "i4"), ("k_ascending", "i4"), ("k_by_index", "i4"),
                  ("causal", "i4"), ("shift", "i4"), ("first_repeat", "i4"), ("repeats", "i4"),
                  ("branch", "i4"), ("dilation", "i4")])
MEMBER = np.dtype([("head", "i4"), ("kv_head", "i4"), ("unit", "i4")])
REPEAT = np.dtype([("stride", "i4"), ("phase", "i4")])
ITEM = np.dtype([("group", "i4"), ("member", "i4"), ("members", "i4"), ("batch", "i4"),
                 ("begin", "i4"), ("rows", "i4")])
SOURCE = np.dtype([("base", "i8"), ("rows", "i8"), ("units", "i8")])

_library = None


def library():
    global _library
    if _library is None:
        _library = ctypes.CDLL(LIBRARY)
        _library.forward.restype = ctypes.c_char_p
        _library.forward.argtypes = [ctypes.c_void_p, ctypes.c_double, ctypes.c_double]
        _library.arrange.restype = ctypes.c_int64
        _library.arrange.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]
        sizes = (ctypes.c_int64 * 6)()
        _library.sizes(sizes)
        want = [t.itemsize for t in (RUN, GROUP, MEMBER, REPEAT, ITEM, SOURCE)]
        assert list(sizes) == want, (list(sizes), want)
    return _library


# ---- tables -------------------------------------------------------------------------------------

def runs_of(source, row, index):
    """Runs (source, count, index, index_stride, stride, first) of a list of rows."""
    out = []
    n = len(row)
    i = 0
    while i < n:
        j = i + 1
        stride = index_stride = 1
        if j < n and source[j] == source[i] and index[j] > index[i]:
            stride, index_stride = row[j] - row[i], index[j] - index[i]
            while (j < n and source[j] == source[i] and row[j] - row[j - 1] == stride
                   and index[j] - index[j - 1] == index_stride):
                j += 1
            if stride <= 0:
                j, stride, index_stride = i + 1, 1, 1
        out.append((source[i], j - i, index[i], index_stride, stride, row[i]))
        i = j
    return out


class Launch:
    """Items of one launch. A group: runs of queries and keys (as runs_of gives them), members
    (head, kv head, unit), causal or None (else the shift), repeats."""

    def __init__(self, groups, batch, name=""):
        runs, table, members, repeats, items = [], [], [], [], []
        for g, group in enumerate(groups):
            lists = []
            for side in ("q", "k"):
                begin, before, ascending, top = len(runs), 0, 1, -1
                for source, count, index, index_stride, stride, first in group[side]:
                    runs.append((source, before, count, index, index_stride, stride, first))
                    before += count
                    ascending &= int(index > top)
                    top = index + (count - 1) * index_stride
                lists += [begin, len(runs) - begin, before, ascending, 0]
            shift = group.get("causal")
            reps = group.get("repeats", [])
            table.append((*lists, int(shift is not None), shift or 0, len(repeats), len(reps), 0,
                          group.get("dilation", 1)))
            repeats += reps
            for member in group["members"]:
                for b in range(batch):
                    items += [(g, len(members), 1, b, begin, min(TILE, lists[2] - begin))
                              for begin in range(0, lists[2], TILE)]
                members.append(member)
        self.name = name
        self.runs = np.array(runs, RUN)
        self.groups = np.array(table, GROUP)
        self.members = np.array(members, MEMBER)
        self.repeats = np.array(repeats or [(1, 0)], REPEAT)
        self.items = np.array(items, ITEM)
        self.device = None

    def host(self):
        class HostTables(ctypes.Structure):
            _fields_ = [(n, ctypes.c_void_p) for n in ("runs", "groups", "members", "repeats", "items")]
            _fields_ += [(n + "_count", ctypes.c_int64)
                         for n in ("runs", "groups", "members", "repeats", "items")]
        arrays = [self.runs, self.groups, self.members, self.repeats, self.items]
        return HostTables(*[a.ctypes.data for a in arrays], *[len(a) for a in arrays])

    def arrange(self, blocks):
        space = np.zeros(4 * len(self.items) + 8 * blocks, ITEM)
        host = self.host()
        count = library().arrange(ctypes.byref(host), blocks, space.ctypes.data, len(space))
        assert count >= 0
        self.items = space[:count].copy()
        return self

    def traits(self):
        out = (ctypes.c_int64 * 4)()
        host = self.host()
        library().traits(ctypes.byref(host), out)
        return list(out)

    def upload(self, blocks):
        import torch
        self.arrange(blocks)
        self.found = self.traits()
        arrays = [self.runs, self.groups, self.members, self.repeats, self.items]
        self.device = [torch.from_numpy(a.view(np.uint8).copy()).cuda() for a in arrays]
        return self


# ---- patterns -----------------------------------------------------------------------------------

LONGNET = [(2048, 1), (4096, 2), (8192, 4), (16384, 8), (32768, 16)]


def offset(kind, h, r, heads):
    return h % r if kind == "interleaved" else h // ((heads + r - 1) // r)


def share_pairs(pattern, kind, h, heads, share, tile=TILE):
    """[(host, host_rows, repeats)] by branch, as src/pattern/shared_pairs.cpp, with windows of whole
    tiles of `tile` rows."""
    nb = len(pattern)
    host, rows, rep = [-1] * nb, [0] * nb, [[] for _ in pattern]
    off = [offset(kind, h, r, heads) for _, r in pattern]
    if not share:
        return list(zip(host, rows, rep))
    order = sorted(range(nb), key=lambda b: (pattern[b][0], pattern[b][1], b))

    def contains(a, b):
        (wa, ra), (wb, rb) = pattern[a], pattern[b]
        return rb <= wb and rb % ra == 0 and off[b] % ra == off[a] and wa % rb == 0 and wb % wa == 0

    for gi, g in enumerate(order):
        for a in reversed(order[:gi]):
            ancestors, x = [], a
            while x >= 0:
                ancestors.append(x)
                x = host[x]
            own = pattern[a][0] // pattern[g][1]
            if own % tile or (pattern[g][0] // pattern[g][1]) % own or not all(
                    contains(x, g) for x in ancestors):
                continue
            host[g], rows[g] = a, own
            for x in ancestors:
                rep[x].append((pattern[g][1] // pattern[x][1], (off[g] - off[x]) // pattern[x][1]))
            break
    return list(zip(host, rows, rep))


def longnet_launches(pattern, n, heads, kv_heads, batch, kind, causal, share, tile=TILE):
    """One launch per branch, coarsest first; segments begin at multiples of w and may be cut off."""
    plans = [share_pairs(pattern, kind, h, heads, share, tile) for h in range(heads)]
    launches = []
    for b in sorted(range(len(pattern)), key=lambda b: (-pattern[b][1], -pattern[b][0])):
        w, r = pattern[b]
        classes = {}
        for h in range(heads):
            key = (offset(kind, h, r, heads), plans[h][b][1], tuple(plans[h][b][2]))
            classes.setdefault(key, []).append((h, h * kv_heads // heads, h * kv_heads // heads))
        groups = []
        for start in range(0, n, w):
            for (o, own, repeats), members in sorted(classes.items(), key=lambda x: (x[0][1], x[0][0])):
                count = max(0, -(-(min(w, n - start) - o) // r))
                if count == 0:
                    continue

                def stretch(first, last):
                    return [(-1, last - first, first, 1, r, start + o + first * r)] if first < last else []

                common = dict(members=members, causal=0 if causal else None, repeats=list(repeats),
                              dilation=r)
                if own == 0:
                    groups.append(dict(q=stretch(0, count), k=stretch(0, count), **common))
                    continue
                for begin in range(0, count, own):
                    end = min(begin + own, count)
                    keys = stretch(0, begin) + ([] if causal else stretch(end, count))
                    if keys:
                        groups.append(dict(q=stretch(begin, end), k=keys, **common))
        if groups:
            launches.append(Launch(groups, batch, f"w{w} r{r}"))
    return launches


def later_words(launches, shape):
    """[launch][item]: bit i % 32 says of the item's row i whether a launch after this one has it. shape: [B, N, H].
    Lists of queries are single runs. None: items are not so even."""
    seen = np.zeros(shape, bool)
    words = []
    for launch in reversed(launches):
        items = launch.items[launch.items["rows"] > 0]
        groups = launch.groups[items["group"]]
        assert (groups["q_runs"] == 1).all()
        run = launch.runs[groups["q_begin"]]
        row = np.arange(TILE)[None, :]
        there = row < items["rows"][:, None]
        token = run["first"][:, None] + (items["begin"][:, None] + np.minimum(row, items["rows"][:, None] - 1)) * run["stride"][:, None]
        where = items["batch"][:, None], token, launch.members["head"][items["member"]][:, None]
        later = seen[where]
        bits = np.zeros((len(items), 32), bool)
        for i in range(TILE // 32):
            bits |= later[:, 32 * i:32 * i + 32] & there[:, 32 * i:32 * i + 32]
        if ((np.tile(bits, TILE // 32) != later) & there).any():
            return None
        word = (bits.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32)
        out = np.zeros(len(launch.items), np.uint32)
        out[launch.items["rows"] > 0] = word
        seen[where] = True
        words.insert(0, out)
    return words


# ---- running ------------------------------------------------------------------------------------

def sms():
    import torch
    return torch.cuda.get_device_properties(0).multi_processor_count


class Problem:
    """Tensors of one attention, and its launches. q: [B, N, H, D] views of any layout."""

    def __init__(self, q, k, v, launches, parcels=None, factor=1.0, final=True, scale=None, finest_first=False):
        import torch
        self.torch = torch
        self.q, self.k, self.v = q, k, v
        self.batch, self.n, self.heads, self.dim = q.shape
        self.scale = scale or 1 / math.sqrt(self.dim)
        self.factor, self.final = factor, final
        self.launches = launches = launches[::-1] if finest_first else launches
        blocks = sms()
        for launch in launches:
            if launch.device is None:
                launch.upload(blocks)
        self.state = torch.full((self.batch, self.n, self.heads, self.dim), math.nan, device="cuda")
        self.lse = torch.full((self.batch, self.n, self.heads), -math.inf, device="cuda")
        self.out = torch.full_like(self.state, math.nan, dtype=q.dtype) if final else None
        self.parcels = parcels  # list of [batch, units, 2, rows, D]
        self.sources = None
        if parcels:
            table = np.array([(p.data_ptr(), p.shape[3], p.shape[1]) for p in parcels], SOURCE)
            self.sources = torch.from_numpy(table.view(np.uint8).copy()).cuda()
        self.later = None
        if finest_first:
            words = later_words(launches, (self.batch, self.n, self.heads))
            assert words is not None
            self.later = [torch.from_numpy(w.view(np.int32)).cuda() for w in words]
        self.calls = [self.call(i) for i in range(len(launches))]

    def rows(self, x, lse=False):
        size = x.element_size()
        s = x.stride()
        return [x.data_ptr(), s[0] * size, s[2] * size, s[1] * size]

    def channel(self, x, section):
        row = x.shape[3] * x.element_size()
        source = self.sources.data_ptr() if self.sources is not None and section >= 0 else 0
        return self.rows(x) + [source, row, max(0, section) * row, 2 * row]

    def call(self, i):
        torch = self.torch
        launch = self.launches[i]
        last = self.final and (i == len(self.launches) - 1 or self.later is not None)
        dtype = {torch.bfloat16: 1, torch.float16: 2}[self.q.dtype]
        numbers = [dtype, self.dim, self.batch, self.n, self.k.shape[1], self.heads, self.k.shape[2]]
        numbers += [t.data_ptr() for t in launch.device] + [0, len(launch.items)]
        numbers += self.channel(self.q, -1) + self.channel(self.k, 0) + self.channel(self.v, 1)
        numbers += self.rows(self.lse) + self.rows(self.state)
        numbers += self.rows(self.out if last else self.state)
        numbers += [dtype if last else 0, int(last), int(i > 0)] + launch.found
        numbers += [torch.cuda.current_stream().cuda_stream, self.later[i].data_ptr() if self.later else 0]
        return (ctypes.c_int64 * len(numbers))(*numbers), self.factor if last else 1.0

    def run(self):
        self.lse.fill_(-math.inf)
        for launch, (numbers, factor) in zip(self.launches, self.calls):
            error = library().forward(numbers, self.scale, factor)
            if error:
                raise RuntimeError(f"launch {launch.name}: {error.decode()}")


# ---- checks -------------------------------------------------------------------------------------

def pair_weights(problem_launches, n, keys, heads, where):
    """[head][query, key]: how often pairs count, straight from the lists. where(source, rows, head)
    says which keys of the whole rows of a source are. And [head][query]: whether any list has it."""
    import torch
    listed = torch.zeros(heads, n, dtype=torch.bool, device="cuda")
    weights = [torch.zeros(n, keys, device="cuda") for _ in range(heads)]

    def rows_of(table, begin, runs):
        src, row, idx = [], [], []
        for r in table[begin:begin + runs]:
            i = np.arange(r["count"])
            src.append(np.full(r["count"], r["source"]))
            row.append(r["first"] + i * r["stride"])
            idx.append(r["index"] + i * r["index_stride"])
        return [np.concatenate(x) for x in (src, row, idx)]

    for launch in problem_launches:
        pairs = {(i["group"], i["member"]) for i in launch.items if i["rows"]}
        for g, m in pairs:
            group, member = launch.groups[g], launch.members[m]
            _, qrow, qidx = rows_of(launch.runs, group["q_begin"], group["q_runs"])
            src, krow, kidx = rows_of(launch.runs, group["k_begin"], group["k_runs"])
            qi, ki = torch.from_numpy(qidx).cuda(), torch.from_numpy(kidx).cuda()
            weight = torch.ones(len(qidx), len(kidx), device="cuda")
            for r in launch.repeats[group["first_repeat"]:group["first_repeat"] + group["repeats"]]:
                weight += ((qi % int(r["stride"]) == int(r["phase"]))[:, None] &
                           (ki % int(r["stride"]) == int(r["phase"]))[None, :]).float()
            if group["causal"]:
                weight *= (ki[None, :] <= qi[:, None] + int(group["shift"])).float()
            h = int(member["head"])
            key = torch.from_numpy(where(src, krow)).cuda()
            row = torch.from_numpy(qrow).cuda()
            weights[h][row[:, None], key[None, :]] += weight
            listed[h, row] = True
    return weights, listed


def pattern_weights(pattern, n, heads, kind, causal):
    import torch
    t = torch.arange(n, device="cuda")
    out = []
    for h in range(heads):
        m = torch.zeros(n, n, device="cuda")
        for w, r in pattern:
            chosen = (t % w) % r == offset(kind, h, r, heads)
            m += (chosen[:, None] & chosen[None, :] & ((t // w)[:, None] == (t // w)[None, :])).float()
        if causal:
            m *= (t[None, :] <= t[:, None]).float()
        out.append(m)
    return out


def compare(problem, weights, listed, keys, values, name):
    """Against fp64. keys, values: [B, all keys, kv heads, D]."""
    import torch
    torch.cuda.synchronize()
    worst_o, worst_l, bad = 0.0, 0.0, []
    top = o2 = d2 = 0.0
    for b in range(problem.batch):
        for h in range(problem.heads):
            m = weights[h]
            kv = h * keys.shape[2] // problem.heads
            q = problem.q[b, :, h].double()
            k, v = keys[b, :, kv].double(), values[b, :, kv].double()
            s = q @ torch.nan_to_num(k).T * problem.scale
            s = torch.where(m > 0, s + torch.log(m.double()), -math.inf)
            lse = torch.logsumexp(s, -1)
            some = (m > 0).any(-1)
            p = torch.where(m > 0, torch.exp(s - lse[:, None]), 0.0)
            ref = p @ torch.nan_to_num(v)
            sick = torch.isnan(v).any(-1) | torch.isnan(k).any(-1)
            poisoned = ((m > 0) & sick[None, :]).any(-1)
            sick_k = ((m > 0) & torch.isnan(k).any(-1)[None, :]).any(-1)
            got = (problem.out if problem.final else problem.state)[b, :, h].double()
            got_l = problem.lse[b, :, h].double()
            good = some & ~poisoned
            if poisoned.any() and not torch.isnan(got[poisoned]).all():
                bad.append(f"b{b} h{h}: rows that see NaN have none")
            if not torch.isfinite(got[good]).all():
                rows = (~torch.isfinite(got).all(-1) & good).nonzero().flatten()
                bad.append(f"b{b} h{h}: {len(rows)} rows not finite, first {rows[:4].tolist()}")
            if not (got_l[~some] == -math.inf).all():
                bad.append(f"b{b} h{h}: empty rows have an L")
            if problem.final and not (got[listed[h] & ~some] == 0).all():
                bad.append(f"b{b} h{h}: empty rows are not zero")
            nobody = ~listed[h] if problem.final else ~some
            if not torch.isnan(got[nobody]).all():
                bad.append(f"b{b} h{h}: rows of nobody were written")
            if good.any():
                want = ref[good] * (problem.factor if problem.final else 1)
                e = (got[good] - want).norm() / want.norm()
                worst_o = max(worst_o, e.item())
                rowwise = ((got[good] - want).norm(dim=-1) / want.norm(dim=-1)).max().item()
                top = max(top, rowwise)
            fine = some & ~sick_k
            if not torch.isfinite(got_l[fine]).all():
                bad.append(f"b{b} h{h}: L not finite")
            if fine.any():
                worst_l = max(worst_l, (got_l[fine] - lse[fine]).abs().max().item())
    limit = 6e-3 if problem.q.dtype == torch.bfloat16 else 1e-3
    # not `>`: NaN must fail
    if not worst_o <= limit:
        bad.append("O")
    if not worst_l <= 2e-4:
        bad.append("L")
    if not top <= 12 * limit:
        bad.append("a row of O")
    print(f"  {name:64s} O {worst_o:.2e} row {top:.1e} L {worst_l:.0e} " + ("ok" if not bad else "BAD " + "; ".join(bad[:3])),
          flush=True)
    return not bad


def tensors(batch, n, heads, kv_heads, dim, dtype="bf16", seed=0, layout="bnhd", keys=None, gain=1.0):
    import torch
    torch.manual_seed(seed)
    kind = torch.bfloat16 if dtype == "bf16" else torch.float16
    out = []
    for i, (t, h) in enumerate(((n, heads), (keys or n, kv_heads), (keys or n, kv_heads))):
        if layout == "bhnd":
            x = torch.randn(batch, h, t, dim, device="cuda").to(kind).transpose(1, 2)
        elif layout == "padded":  # rows and heads with space in between
            x = torch.randn(batch, t, h + 1, dim + 8, device="cuda").to(kind)[:, :, :h, :dim]
        else:
            x = torch.randn(batch, t, h, dim, device="cuda").to(kind)
        out.append(x * gain if i == 0 and gain != 1 else x)
    return out


def check_pattern(name, pattern, n, heads=4, kv_heads=4, batch=1, dim=128, dtype="bf16", kind="blocked",
                  causal=False, share=False, layout="bnhd", sick=False, tile=TILE, factor=1.0, final=True,
                  gain=1.0, want_weights=None, finest_first=False):
    import torch
    q, k, v = tensors(batch, n, heads, kv_heads, dim, dtype, len(name), layout, gain=gain)
    if sick and causal:  # a future value must not be seen
        for t in (n // 3, n - 5):
            v[:, t] = math.nan
        k[:, n - 9] = math.nan
    launches = longnet_launches(pattern, n, heads, kv_heads, batch, kind, causal, share, tile)
    problem = Problem(q, k, v, launches, factor=factor, final=final, finest_first=finest_first)
    if want_weights is not None:
        found = max(l.found[1] for l in launches)
        if found != want_weights:
            print(f"  {name}: weights {found}, expected {want_weights} BAD")
            return False
    weights, listed = pair_weights(launches, n, n, heads, lambda s, r: r)
    for h, m in enumerate(pattern_weights(pattern, n, heads, kind, causal)):
        assert torch.equal(m, weights[h]), f"plan of head {h}"
    problem.run()
    return compare(problem, weights, listed, k, v, name)


def check_lists(name, lists, n, keys=None, heads=2, kv_heads=2, batch=1, dim=128, dtype="bf16", parcel_rows=(),
                sick=True, final=True, layout="bnhd"):
    """lists: groups with q = (rows, indices), k = (sources, rows, indices)."""
    import torch
    keys = keys or n
    q, k, v = tensors(batch, n, heads, kv_heads, dim, dtype, len(name), layout, keys)
    parcels = [torch.randn(batch, kv_heads, 2, r, dim, device="cuda").to(q.dtype) for r in parcel_rows]
    starts = [keys + sum(parcel_rows[:i]) for i in range(len(parcel_rows))]

    def where(src, row):
        start = np.array(starts + [0])[src] if starts else 0  # source -1: the last entry
        return row + start

    groups, seen = [], set()
    for g in lists:
        ks, kr, ki = g["k"]
        qr, qi = g["q"]
        seen.update(where(np.array(ks), np.array(kr)).tolist())
        groups.append(dict(q=runs_of([-1] * len(qr), list(qr), list(qi)), k=runs_of(list(ks), list(kr), list(ki)),
                           members=g.get("members", [(h, h * kv_heads // heads, h * kv_heads // heads)
                                                     for h in range(heads)]),
                           causal=g.get("causal"), repeats=g.get("repeats", [])))
    launch = Launch(groups, batch, name)
    if sick:  # rows of nobody
        alone = torch.ones(keys + sum(parcel_rows), dtype=torch.bool)
        alone[list(seen)] = False
        alone = alone.cuda()
        k[:, alone[:keys]] = math.nan
        v[:, alone[:keys]] = math.nan
        for p, start in zip(parcels, starts):
            p[:, :, :, alone[start:start + p.shape[3]]] = math.nan
    problem = Problem(q, k, v, [launch], parcels=parcels, final=final)
    all_k = torch.cat([k] + [p[:, :, 0].transpose(1, 2) for p in parcels], 1)
    all_v = torch.cat([v] + [p[:, :, 1].transpose(1, 2) for p in parcels], 1)
    weights, listed = pair_weights([launch], n, keys + sum(parcel_rows), heads, where)
    problem.run()
    return compare(problem, weights, listed, all_k, all_v, name)


SMALL = [(256, 1), (512, 2), (1024, 4), (2048, 8)]
NEAR = [(512, 1), (1024, 2), (2048, 4)]


def checks():
    out = {}

    def add(group, name, run):
        out[name] = (group, run)

    def pattern(group, name, *a, **o):
        add(group, name, lambda: check_pattern(name, *a, **o))

    for dim in (128, 64):
        for causal in (False, True):
            tag = f"d{dim} {'causal' if causal else 'full'}"
            pattern("basic", f"dense 256 {tag}", [(256, 1)], 256, dim=dim, causal=causal)
            pattern("basic", f"dense 1024 {tag}", [(1024, 1)], 2048, dim=dim, causal=causal)
            pattern("basic", f"longnet {tag}", SMALL, 4096, heads=8, kv_heads=8, dim=dim, causal=causal)
            pattern("basic", f"longnet interleaved gqa batch {tag}", SMALL, 2048, heads=8, kv_heads=2, batch=2, dim=dim,
                    causal=causal, kind="interleaved")
            pattern("basic", f"ragged {tag}", [(300, 1), (700, 3), (1500, 5)], 1999, dim=dim, causal=causal)
            pattern("basic", f"fp16 {tag}", SMALL, 2048, dim=dim, causal=causal, dtype="fp16")
            # many key tiles, some and all rows with a state
            pattern("basic", f"long {tag}", [(1536, 1), (1536, 1), (1536, 2)], 3072, heads=2, kv_heads=2, dim=dim, causal=causal)
            pattern("weights", f"shared long {tag}", [(1536, 1), (3072, 2)], 3072, heads=4, dim=dim, causal=causal, share=True)
            pattern("weights", f"shared blocked {tag}", NEAR, 4096, heads=8, kv_heads=8, dim=dim, causal=causal, share=True,
                    want_weights=1)
            pattern("weights", f"shared interleaved gqa {tag}", NEAR, 4096, heads=8, kv_heads=4, dim=dim, causal=causal,
                    share=True, kind="interleaved", want_weights=1)
            pattern("weights", f"shared general {tag}", [(768, 1), (2304, 3)], 4608, heads=3, kv_heads=3, dim=dim,
                    causal=causal, share=True, tile=1, want_weights=2)
            pattern("weights", f"shared windows of 40 {tag}", [(160, 1), (640, 4)], 1920, heads=4, dim=dim, causal=causal,
                    share=True, tile=1, want_weights=1)
            pattern("basic", f"finest first {tag}", SMALL, 4096, heads=8, kv_heads=8, dim=dim, causal=causal, factor=0.5,
                    finest_first=True)
            pattern("weights", f"shared finest first {tag}", NEAR, 4096, heads=8, kv_heads=4, dim=dim, causal=causal,
                    share=True, kind="interleaved", finest_first=True)
            pattern("weights", f"shared fp16 {tag}", NEAR, 2048, heads=4, dim=dim, causal=causal, share=True, dtype="fp16")
            # later tiles have far higher scores than earlier ones
            pattern("basic", f"large scores {tag}", SMALL, 2048, dim=dim, causal=causal, gain=12.0)
            pattern("weights", f"shared large scores {tag}", NEAR, 2048, dim=dim, causal=causal, share=True, gain=12.0)
            pattern("weights", f"large scores fp16 {tag}", NEAR, 2048, dim=dim, causal=causal, share=True, dtype="fp16", gain=12.0)
    pattern("basic", "one row", [(1, 1)], 1, heads=1, kv_heads=1)
    pattern("basic", "129 rows causal", [(129, 1)], 129, causal=True)
    pattern("basic", "heads first", SMALL, 2048, layout="bhnd", causal=True)
    pattern("basic", "padded rows", SMALL, 2048, layout="padded")
    pattern("basic", "factor", SMALL, 2048, factor=0.25)
    pattern("basic", "state only", SMALL[:3], 2048, final=False)
    pattern("basic", "some rows only, state", SMALL[2:], 2048, final=False, causal=True)
    pattern("basic", "some rows only, for good", SMALL[3:], 2048, causal=True)
    for dim in (128, 64):
        pattern("basic", f"NaN in the future d{dim}", [(640, 1)], 1280, dim=dim, causal=True, sick=True)
        pattern("basic", f"NaN in the future, ragged d{dim}", [(300, 1), (700, 3)], 1999, dim=dim, causal=True, sick=True)
        pattern("weights", f"NaN in the future, shared d{dim}", NEAR, 2048, dim=dim, causal=True, sick=True, share=True)

    def lists(name, groups, *a, **o):
        add("irregular", name, lambda: check_lists(name, groups, *a, **o))

    rng = np.random.default_rng(1)

    def some(n, count):
        return np.sort(rng.permutation(n)[:count])

    for dim in (128, 64):
        for causal in (None, 0, 37, -50):
            tag = f"d{dim} " + ("full" if causal is None else f"causal {causal}")
            ks = some(1500, 700)
            qs = some(1500, 300)
            lists(f"scattered rows {tag}", [dict(q=(qs, qs), k=([-1] * 700, ks, ks), causal=causal)], 1500, dim=dim)
            two = np.r_[0:400, 700:1100]
            lists(f"two long runs {tag}", [dict(q=(np.arange(1200), np.arange(1200)), k=([-1] * 800, two, two), causal=causal)],
                  1200, dim=dim)
            back = np.r_[800:1200, 100:500]  # not ascending
            lists(f"runs out of order {tag}", [dict(q=(np.arange(500, 1000), np.arange(500, 1000)), k=([-1] * 800, back, back),
                                                    causal=causal)], 1200, dim=dim)
            # keys of three owners: a stripe here, two parcels
            src = np.r_[np.zeros(300, int), np.full(300, -1), np.ones(300, int)]
            row = np.r_[np.arange(300), np.arange(10, 910, 3), np.arange(300)]
            idx = np.r_[np.arange(0, 300), np.arange(300, 600), np.arange(600, 900)]
            lists(f"parcels {tag}", [dict(q=(np.arange(10, 910, 3), np.arange(300, 600)), k=(src, row, idx), causal=causal)],
                  1000, keys=1000, dim=dim, parcel_rows=(300, 310), batch=2, heads=4, kv_heads=2)
            # every third index is here: zigzag-like index strides
            here = np.arange(0, 900, 3)
            lists(f"index stride 3 {tag}", [dict(q=(np.arange(300), here + 1), k=([-1] * 300, np.arange(300), here), causal=causal)],
                  300, dim=dim)
            lists(f"several groups, general weights {tag}",
                  [dict(q=(np.arange(200), np.arange(200)), k=([-1] * 200, np.arange(200), np.arange(200)), causal=causal,
                        repeats=[(3, 1), (5, 2), (6, 4), (2, 1)]),
                   dict(q=(np.arange(200, 513), np.arange(313)), k=([-1] * 313, np.arange(200, 513), np.arange(313)), causal=causal,
                        repeats=[(7, 0)])], 513, dim=dim)
    lists("few keys", [dict(q=(np.arange(500), np.arange(500)), k=([-1] * 3, [5, 6, 7], [5, 6, 7]), causal=None)], 500)
    lists("queries that see nothing", [dict(q=(np.arange(256), np.arange(256)), k=([-1] * 128, np.arange(128), np.arange(200, 328)),
                                            causal=0)], 256)
    lists("nothing seen, state", [dict(q=(np.arange(256), np.arange(256)), k=([-1] * 128, np.arange(128), np.arange(200, 328)),
                                       causal=0)], 256, final=False)
    lists("fp16 scattered", [dict(q=(some(900, 333), np.arange(333)), k=([-1] * 444, some(900, 444), np.arange(444)), causal=5)],
          900, dtype="fp16")
    return out


def run_checks(names):
    import torch
    torch.backends.cuda.matmul.allow_tf32 = False
    every = checks()
    chosen = [n for n in every if not names or n in names or every[n][0] in names]
    failed = []
    began = time.time()
    for name in chosen:
        print(f"> {name}", flush=True)
        try:
            if not every[name][1]():
                failed.append(name)
        except Exception as error:  # noqa: BLE001
            print(f"  {name}: {type(error).__name__}: {str(error)[:300]} BAD", flush=True)
            failed.append(name)
            try:
                torch.cuda.synchronize()
            except Exception as sticky:  # noqa: BLE001
                print(f"  the device is lost after '{name}': {str(sticky)[:200]}", flush=True)
                break
    print(f"{len(chosen)} checks, {len(failed)} failed, {time.time() - began:.0f} s: {failed}", flush=True)
    return not failed


def run_host():
    """Arranging loses no item and evens out the blocks."""
    for causal in (False, True):
        for share in (False, True):
            for launch in longnet_launches(LONGNET, 262144, 16, 16, 1, "blocked", causal, share):
                before = launch.items.copy()
                began = time.time()
                found = launch.traits()
                launch.arrange(132)
                spent = time.time() - began
                kept = launch.items[launch.items["rows"] > 0]
                assert sorted(map(tuple, kept)) == sorted(map(tuple, before))
                loads = np.zeros(132)
                for i, item in enumerate(launch.items):
                    if item["rows"]:
                        g = launch.groups[item["group"]]
                        tiles = -(-g["k_rows"] // TILE)
                        if g["causal"] and launch.runs[g["q_begin"]]["index"] == launch.runs[g["k_begin"]]["index"]:
                            tiles = item["begin"] // TILE + 1
                        loads[i % 132] += tiles + 1.6
                print(f"causal {int(causal)} shared {int(share)} {launch.name}: traits {found}, {len(before)} items, "
                      f"{len(launch.items)} arranged in {spent * 1e3:.0f} ms, "
                      f"longest block / mean {loads.max() / loads.mean():.3f}")
    return True


# ---- times --------------------------------------------------------------------------------------

def cudnn(q, k, v, pattern, causal):
    import peers
    for w, r in pattern:
        for o in range(r):
            out = peers.cudnn_forward(*peers.views([q, k, v], w, r, o), causal)
    return out[0], out[1]


def bench():
    import peers
    import torch
    results = []
    heads = 16

    def one(title, pattern, n, dim, causal, plans):
        q, k, v = tensors(1, n, heads, heads, dim)
        flops = sum(4.0 * dim * (n // w) * heads * (w // r) ** 2 for w, r in pattern) * (0.5 if causal else 1)
        functions, problems = {}, {}
        for plan, (kind, share) in plans.items():
            problems[plan] = Problem(q, k, v, longnet_launches(pattern, n, heads, heads, 1, kind, causal, share))
            functions[plan] = problems[plan].run
        functions["cudnn"] = lambda: cudnn(q, k, v, pattern, causal)
        try:
            found = peers.spreads(functions, 5)
        except Exception as error:  # noqa: BLE001
            print(f"{title}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            torch.cuda.synchronize()
            return
        base = found["cudnn"][0]
        for name, (median, low, high) in found.items():
            results.append(dict(case=title, name=name, ms=median, low=low, high=high, tflops=flops / median / 1e9,
                                ratio=median / base))
            print(f"{title:28s} {name:20s} {median:8.3f} ms ({low:.3f}..{high:.3f}) {flops / median / 1e9:6.0f} TF"
                  f"  {median / base:.3f} of cuDNN", flush=True)
        if len(pattern) == 1:  # the error of both, on one head
            w = pattern[0][0]
            x, _ = cudnn(q, k, v, pattern, causal)
            a = [t[0, :w, 3].double() for t in (q, k, v)]
            s = a[0] @ a[1].T / math.sqrt(dim)
            if causal:
                s.masked_fill_(torch.ones_like(s, dtype=torch.bool).triu(1), -math.inf)
            ref = torch.softmax(s, -1) @ a[2]
            own = problems[next(iter(problems))]
            own.run()
            print(f"{'':28s} error: own {((own.out[0, :w, 3].double() - ref).norm() / ref.norm()).item():.2e} "
                  f"cuDNN {((x[0, 3].double() - ref).norm() / ref.norm()).item():.2e}", flush=True)

    for dim in (128, 64):
        for causal in (False, True):
            plans = {"shared blocked": ("blocked", True), "unshared": ("blocked", False)}
            if dim == 128:
                plans["shared interleaved"] = ("interleaved", True)
            one(f"longnet 256K d{dim} {'causal' if causal else 'full'}", LONGNET, 262144, dim, causal, plans)
            torch.cuda.empty_cache()
    for w in (2048, 4096, 16384):
        for causal in (False, True):
            one(f"dense {w} d128 {'causal' if causal else 'full'}", [(w, 1)], 65536, 128, causal, {"own": ("blocked", False)})
            torch.cuda.empty_cache()
    out = os.environ.get("OUT")
    if out:
        with open(os.path.join(out, "forward_sm90.json"), "w") as file:
            json.dump(results, file, indent=1)
    return True


def main():
    what = sys.argv[1] if len(sys.argv) > 1 else "all"
    if what == "check":
        sys.exit(0 if run_checks(sys.argv[2:]) else 1)
    if what == "bench":
        sys.exit(0 if bench() else 1)
    if what == "host":
        sys.exit(0 if run_host() else 1)
    # Side by side, and each in its own process: a device error ends only one of them, and a hang is
    # cut short.
    began = time.time()
    parts = {}
    for group in ("basic", "irregular", "weights"):
        parts[group] = subprocess.Popen([sys.executable, __file__, "check", group], stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True)
    ok = True
    for group, process in parts.items():
        try:
            text, _ = process.communicate(timeout=max(5, 100 - (time.time() - began)))
        except subprocess.TimeoutExpired:
            process.kill()
            text, _ = process.communicate()
            text += "\nTIMED OUT: the last check hangs\n"
        if process.returncode != 0:
            ok = False
        lines = [l for l in text.splitlines() if not l.startswith("> ") or process.returncode != 0]
        if process.returncode == 0:
            lines = lines[-1:]
        else:
            hung = [l for l in lines if l.startswith("> ")][-1:]
            lines = [l for l in lines if not l.startswith("> ") and not l.endswith(" ok")] + hung
        print(f"[{group}] rc {process.returncode}\n" + "\n".join(lines[-40:]), flush=True)
    print(f"checks: {'ok' if ok else 'FAILED'} in {time.time() - began:.0f} s", flush=True)
    try:
        subprocess.run([sys.executable, __file__, "bench"], timeout=200, check=False)
    except subprocess.TimeoutExpired:
        print("bench TIMED OUT")
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
