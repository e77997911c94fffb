"""The rows of bench.lua in PyTorch. Reads "prepare NAME THREADS" and "run" lines, answers one line each."""
import subprocess
import sys
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


ROWS = {
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
            run(1)
            n = 1 if words[1] == "start" else calibrate(run, 0.3)
            print("ready", flush=True)
        else:
            t = time.perf_counter()
            run(n)
            print((time.perf_counter() - t) / n, flush=True)


main()
