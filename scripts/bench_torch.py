"""The rows of bench.lua in PyTorch. Reads "prepare NAME THREADS" and "run" lines, answers one line each."""
import os
import subprocess
import sys
import tempfile
import time

import torch
from torch import nn
import torch.nn.functional as F

N = 16 * 1024 * 1024


def loop(f):
    def run(n):
        for _ in range(n):
            f()
    return run


def start():
    return loop(lambda: subprocess.run([sys.executable, "-c", "import torch; torch.zeros(2)"], check=True))


def pair(grad=True):
    return torch.randn(4, requires_grad=grad), torch.randn(4, requires_grad=grad)


def add():
    a, b = pair()
    return loop(lambda: a + b)


def add_():
    a, b = pair(False)
    return loop(lambda: a.add_(b))


def backward():
    a, b = pair()
    return loop(lambda: (a * b).sum().backward())


def linear():
    m, x = nn.Linear(8, 8), torch.randn(1, 8)
    return loop(lambda: m(x))


class Trivial(nn.Module):
    def forward(self, x):
        return x


class Nested(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.inner = Nested(depth - 1) if depth > 1 else None

    def forward(self, x):
        return x if self.inner is None else self.inner(x)


def turns(make, use):
    """Eight objects by turns, as bench.lua has them."""
    def prepare():
        objects, x = [make() for _ in range(8)], torch.zeros(1)

        def run(n):
            for i in range(n):
                use(objects[i % 8], x)
        return run
    return prepare


def call(m, x):
    m(x)


def mlp(*sizes):
    layers = []
    for i in range(len(sizes) - 1):
        layers.append(nn.Linear(sizes[i], sizes[i + 1]))
        if i < len(sizes) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def trainer(model, opt, loss):
    def step():
        opt.zero_grad()
        loss(model).backward()
        opt.step()
    return loop(step)


def mlp_small():
    m, x, y = mlp(784, 64, 10), torch.randn(64, 784), torch.randint(0, 10, (64,))
    return trainer(m, torch.optim.SGD(m.parameters(), lr=0.01), lambda net: F.cross_entropy(net(x), y))


def mlp_tiny():
    m, x, y = mlp(8, 32, 32, 1), torch.randn(16, 8), torch.randn(16, 1)
    return trainer(m, torch.optim.Adam(m.parameters(), lr=1e-3), lambda net: F.mse_loss(net(x), y))


def mlp_large():
    m, x, y = mlp(784, 256, 128, 10), torch.randn(128, 784), torch.randint(0, 10, (128,))
    return trainer(m, torch.optim.SGD(m.parameters(), lr=0.01), lambda net: F.cross_entropy(net(x), y))


def products():
    sizes, b, pairs = (784, 256, 128, 10), 128, []
    for i in range(3):
        x, w, dy = torch.randn(b, sizes[i]), torch.randn(sizes[i + 1], sizes[i]), torch.randn(b, sizes[i + 1])
        pairs += [(x, w.t()), (dy.t(), x)] + ([(dy, w)] if i > 0 else [])
    return loop(lambda: [torch.matmul(a, b) for a, b in pairs])


def big(f):
    def make():
        a, b = torch.randn(N), torch.randn(N)
        return loop(lambda: f(a, b))
    return make


def big_model():
    return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(16)])


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        for i in range(100):
            setattr(self, "p%d" % i, nn.Parameter(torch.randn(4)))


def tiny_model():
    return nn.ModuleList(Tiny() for _ in range(100))


def there_and_back(make, overwrite=False, swap=False):
    """A model to bfloat16 and back, with the flags on. Versions before 2.3 have no swap."""
    def prepare():
        if swap and not hasattr(torch.__future__, "set_swap_module_params_on_conversion"):
            return None
        model = make()

        def run(n):
            torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
            if swap:
                torch.__future__.set_swap_module_params_on_conversion(True)
            for _ in range(n):
                model.to(torch.bfloat16).to(torch.float32)
            torch.__future__.set_overwrite_module_params_on_conversion(False)
            if swap:
                torch.__future__.set_swap_module_params_on_conversion(False)
        return run
    return prepare


def mapped(path):
    try:
        return torch.load(path, mmap=True)
    except TypeError:  # before 2.1
        return torch.load(path)


def load(fresh=False, **options):
    """load_state_dict from a mapped file, mapped each time where fresh."""
    def prepare():
        model = big_model()
        if options and not hasattr(torch, "compile"):  # 1.13 has no assign
            return None
        fd, path = tempfile.mkstemp()
        os.close(fd)
        torch.save(model.state_dict(), path)
        sd = mapped(path)
        if not fresh:
            os.remove(path)
        return loop(lambda: model.load_state_dict(mapped(path) if fresh else sd, **options))
    return prepare


def tiny_load():
    model, sd = tiny_model(), tiny_model().state_dict()
    return loop(lambda: model.load_state_dict(sd))


ROWS = {
    "convert": there_and_back(big_model), "convert_swap": there_and_back(big_model, swap=True),
    "tiny_default": there_and_back(tiny_model), "tiny_overwrite": there_and_back(tiny_model, overwrite=True),
    "tiny_swap": there_and_back(tiny_model, swap=True), "tiny_load": tiny_load,
    "load": load(), "load_file": load(fresh=True), "assign": load(assign=True),
    "start": start, "add": add, "add_": add_, "backward": backward, "linear": linear, "mlp_small": mlp_small, "mlp_tiny": mlp_tiny,
    "mlp_large": mlp_large, "products": products,
    "add_big": big(lambda a, b: a + b), "relu_big": big(lambda a, b: torch.relu(a)), "sum_big": big(lambda a, b: a.sum()),
    "exp_big": big(lambda a, b: a.exp()),
    "parameter": turns(lambda: nn.Linear(2, 2), lambda m, x: m.weight), "trivial": turns(Trivial, call),
    "stack": turns(lambda: nn.Sequential(*[Trivial() for _ in range(40)]), call), "nest": turns(lambda: Nested(100), call),
}


def calibrate(run, target):
    n = 1
    while True:
        t = time.perf_counter()
        run(n)
        t = time.perf_counter() - t
        if t > target / 4:
            return max(1, int(n * target / t))
        n *= 4


def main():
    print(torch.__version__, flush=True)
    run, n = None, 1
    for line in sys.stdin:
        words = line.split()
        if words[0] == "prepare":
            torch.set_num_threads(int(words[2]))
            run = ROWS[words[1]]()
            if run is None:
                print("missing", flush=True)
                continue
            run(1)
            n = 1 if words[1] == "start" else calibrate(run, 0.3)
            print("ready", flush=True)
        else:
            t = time.perf_counter()
            run(n)
            print((time.perf_counter() - t) / n, flush=True)


main()
