"""turn.py VARIANT LOCK OUT LAYERS: a turn of the loop as the captured recorder lowers it, in a CUDA graph of TURNS turns; kernel times."""
import contextlib, fcntl, json, os, sys, time
variant, lock, out, layers = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
flags = set(variant.split(","))
os.environ["LOOPS_V"] = variant
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"/tmp/loops_turn/{variant.replace(',', '_')}"
os.environ["TRITON_CACHE_DIR"] = f"/tmp/loops_turn/triton_{variant.replace(',', '_')}"
begun = time.time()
import torch
sys.path.insert(0, "tests/bench/builds")
import loops
from torch import nn
from torch._inductor.runtime import triton_heuristics as th
import torch._inductor.choices as ch
from cgcompile.targets.cuda.inductor import compile_graph
from cgcompile.targets.cuda.lowering import OPTIONS
device = "cuda" if torch.cuda.is_available() else "cpu"
TURNS, PLACES = 8, 128

old_p = th._persistent_reduction_configs
def persistent(size_hints, *args, **kwargs):
    made = old_p(size_hints, *args, **kwargs)
    r = size_hints.get("r0_", 0)
    for f in flags:
        if f.startswith("w") and f[1:].isdigit() and r == 1024 and size_hints["x"] > 64:  # products of 768
            for c in made: c.num_warps, c.kwargs["XBLOCK"] = int(f[1:]), 1
        if f.startswith("x") and r == 1024 and size_hints["x"] > 64:
            for c in made: c.kwargs["XBLOCK"] = int(f[1:])
        if f.startswith("s") and f[1:].isdigit() and r == 1024 and size_hints["x"] <= 1024 and size_hints["x"] > 64:  # the small products
            for c in made: c.num_warps, c.kwargs["XBLOCK"] = int(f[1:]), 1
        if f.startswith("l") and f[1:].isdigit() and r == 4096:
            for c in made: c.num_warps, c.kwargs["XBLOCK"] = int(f[1:]), 1
    return made
th._persistent_reduction_configs = persistent
old_r = th._reduction_configs
def looped(*, size_hints, **kwargs):
    made = old_r(size_hints=size_hints, **kwargs)
    for f in flags:
        if f.startswith("r") and f[1:].isdigit() and size_hints.get("r0_") == 4096:  # rBLOCK of 3072
            for c in made: c.kwargs["R0_BLOCK"] = int(f[1:])
    return made
th._reduction_configs = looped
if "persist" in flags:
    old_s = ch.InductorChoices.should_use_persistent_reduction
    def should(features, cooperative):
        from torch._inductor.runtime.hints import ReductionHint
        if not cooperative and features.get_reduction_hint() == ReductionHint.INNER and int(features.reduction_numel) <= 4096:
            return True
        return old_s(features, cooperative)
    ch.InductorChoices.should_use_persistent_reduction = staticmethod(should)
import torch._inductor.config as config
options = {**OPTIONS}
if "pad" in flags: options["inplace_padding"] = False
if "debug" not in flags: options["assert_indirect_indexing"] = "noassert" not in flags

class Turn(loops.Decoder):
    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("place", torch.zeros((), dtype=torch.int64)); self.register_buffer("token", torch.tensor([17]))
        self.register_buffer("out", torch.zeros(PLACES, dtype=torch.int64)); self.register_buffer("go", torch.tensor(True))
        for i, value in enumerate(self.empty(torch.zeros(1))): self.register_buffer(f"cache{i}", value)
    def forward(self):
        kept = [self.get_buffer(f"cache{i}") for i in range(2 * len(self.layers))]
        token, made = self.next(self.token, self.place, kept)
        new = self.out.index_copy(0, self.place.view(1), token)
        for old, value in zip(kept, made): old.copy_(value)
        self.out.copy_(new); self.token.copy_(token)
        place = self.place + 1
        self.place.copy_(place); self.go.copy_((place < PLACES) & (token != -1).all())
        return place + 0

torch.manual_seed(0)
model = Turn(layers, 768, PLACES, torch.bfloat16).eval()
torch.manual_seed(0)
plain = Turn(layers, 768, PLACES, torch.bfloat16).eval().to(device)
model = model.to(device)
with torch.no_grad():
    module = torch.export.export(model, (), strict=False).run_decompositions({}).module()
for node in [n for n in module.graph.nodes if n.op == 'call_module']: module.graph.erase_node(node)
buffers = dict(module.named_buffers())
def reset(m):
    m["place"].zero_(); m["token"].fill_(17); m["out"].zero_()
    for n, v in m.items():
        if n.startswith("cache"): v.zero_()
if device == "cpu":
    from unittest import mock
    print("exported", time.time() - begun); sys.exit()
call = compile_graph(module, [], options, False)
with torch.no_grad():
    call(); torch.cuda.synchronize()
    compiled = time.time() - begun
    open(f"{lock}.ready.{os.getpid()}", "w").close()
    import glob
    while len(glob.glob(f"{lock}.ready.*")) < int(os.environ["COUNT"]) and time.time() < float(os.environ["GO"]): time.sleep(0.2)
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        reset(buffers)
        call(); call()
        own = dict(plain.named_buffers()); reset(own); plain(); plain()
        worst = max(float((buffers[n].float() - own[n].float()).abs().max() / own[n].float().abs().max()) for n in own if n.startswith("cache"))
        reset(buffers); reset(own)
        for _ in range(40): call(); plain()
        same = int((buffers["out"][:40] == own["out"][:40]).sum())
        side = torch.cuda.Stream(); graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            reset(buffers); torch.cuda.synchronize()
            graph.capture_begin(capture_error_mode='thread_local')
            for _ in range(TURNS): call()
            graph.capture_end()
        torch.cuda.synchronize()
        times = []
        for _ in range(12):
            reset(buffers); a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay(); a.record()
            for _ in range(12): graph.replay()
            b.record(); b.synchronize(); times.append(a.elapsed_time(b) * 1000 / 12 / TURNS)
        times.sort()
        reset(buffers)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            graph.replay(); graph.replay(); torch.cuda.synchronize()
        events = sorted([(e.time_range.start, e.time_range.end, e.name) for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA])
        per, gaps = {}, {}
        for before, e in zip(events, events[1:]):
            per.setdefault(e[2], []).append(e[1] - e[0]); gaps.setdefault(e[2], []).append(e[0] - before[1])
with open(out, "w") as file:
    print(f"== {variant}: turn {times[len(times)//2]:.1f} us (least {times[0]:.1f}); kernels a turn {len(events)/2/TURNS:.1f}; same tokens {same}/40; worst cache {worst:.4f}; compiled after {compiled:.0f} s, all {time.time()-begun:.0f}", file=file)
    for name in sorted(per, key=lambda n: -sum(per[n])):
        v, g = sorted(per[name]), sorted(gaps[name])
        print(f"   {len(v)/2/TURNS:5.1f} x {v[len(v)//2]:6.2f} us, gap before {g[len(g)//2]:5.2f}  {name[:70]}", file=file)
