import json, os, re, sys
from pathlib import Path
sys.path.insert(0, os.getcwd())
import torch
import benchmarks.engine.decode_step as d
from phalanx.engine.ranks.graphs import CudaTape
out = {}
def timed(work, n=20):
    r = CudaTape(torch.device("cuda", 0)).record(work)
    ts = []
    for _ in range(9):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); r(); b.record(); b.synchronize(); ts.append(a.elapsed_time(b) * 1e3)
    return sorted(ts)[4]
p = d.products(); out["products"] = p
for k, v in p.items():
    print(k, json.dumps(v), flush=True)
labels = [str(v) for v in d.VARIANTS]
total = {l: sum((p[s][l][0] if isinstance(p[s][l], list) else 1e9) * (1 if s == "head" else 32) for s in p) for l in ["torch", *labels]}
print(total)
best = eval(min(labels, key=total.get))
f = Path("src/phalanx/kernels/products/one_row.py")
f.write_text(re.sub(r"ROWS, BLOCK, WARPS = .*", "ROWS, BLOCK, WARPS = %d, %d, %d" % best, f.read_text()))
import phalanx.kernels.products.one_row as o
o.one_row.__kwdefaults__.update(rows=best[0], block=best[1], warps=best[2])
json.dump({"best": best}, open("/tmp/best.json", "w"))
def attention():
    import flashinfer
    res = {}
    dev = "cuda"
    for rows, length in ((1, 190), (64, 190), (64, 1500)):
        per = -(-length // 16)
        caches = [[torch.randn(rows * per + 1, 16, 8, 128, dtype=torch.bfloat16, device=dev) for _ in range(2)] for _ in range(4)]
        q = torch.randn(rows, 32, 128, dtype=torch.bfloat16, device=dev)
        indptr = torch.arange(rows + 1, dtype=torch.int32) * per
        idx = torch.randperm(rows * per).to(torch.int32)
        last = torch.full((rows,), (length - 1) % 16 + 1, dtype=torch.int32)
        ws = torch.zeros(256 << 20, dtype=torch.uint8, device=dev)
        for name in ("fa2 graph", "fa2 whole", "fa3 graph", "prefill fa2", "prefill fa3"):
            try:
                if name.startswith("prefill"):
                    w = flashinfer.BatchPrefillWithPagedKVCacheWrapper(ws, "NHD", backend=name[-3:])
                    w.plan(torch.arange(rows + 1, dtype=torch.int32), indptr, idx.cuda(), last, 32, 8, 128, 16, causal=True, q_data_type=torch.bfloat16)
                elif "graph" in name:
                    w = flashinfer.BatchDecodeWithPagedKVCacheWrapper(ws, "NHD", use_cuda_graph=True, use_tensor_cores=True, backend=name[:3],
                        paged_kv_indptr_buffer=indptr.cuda(), paged_kv_indices_buffer=idx.cuda(), paged_kv_last_page_len_buffer=last.cuda())
                    w.plan(indptr, idx, last, 32, 8, 128, 16, q_data_type=torch.bfloat16)
                else:
                    w = flashinfer.BatchDecodeWithPagedKVCacheWrapper(ws, "NHD", use_tensor_cores=True)
                    w.plan(indptr, idx, last, 32, 8, 128, 16, q_data_type=torch.bfloat16, disable_split_kv=True)
                o_ = torch.empty_like(q)
                def work():
                    for _ in range(4):
                        for c in caches:
                            w.run(q, tuple(c), out=o_)
                res[f"{rows}x{length} {name}"] = round(timed(work) / 16, 2)
            except Exception as e:
                res[f"{rows}x{length} {name}"] = repr(e)[:150]
    return res
out["attention"] = attention(); print(json.dumps(out["attention"], indent=0), flush=True)
out["tokens"] = d.tokens(); print(out["tokens"], flush=True)
out["steps"] = d.steps([1, 64], ["graphs"]); print(d.show("steps", out["steps"]), flush=True)
from benchmarks import record
record.write("explore", out, Path(os.environ["OUT"]))
