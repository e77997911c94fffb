"""Writes interchange_*.safetensors beside this script: state dictionaries of the models of interchange.py, and inputs
with the outputs that belong to them. spec/nn/interchange_spec.lua reads them. (torch 2, safetensors 0.8)"""

import pathlib

import torch
from safetensors.torch import save_file, save_model

from interchange import MODELS

here = pathlib.Path(__file__).parent
torch.manual_seed(3)
io = {}
for name, make in MODELS.items():
    model = make()
    if name == "norms":
        x = torch.randint(0, 11, (8, 3))
        with torch.no_grad():
            for p in (*model.ln.parameters(), *model.bn.parameters()):
                p.normal_()
    else:
        x = torch.randn(8, 5 if name == "mlp" else 4, dtype=model.state_dict()[next(iter(model.state_dict()))].dtype)
    if name == "tied":
        model.scale.fill_(2.5)
    for _ in range(3):
        model(x)  # running statistics
    model.eval()
    io[f"{name}.x"] = x
    io[f"{name}.y"] = model(x).detach()
    path = here / f"interchange_{name}.safetensors"
    if name == "tied":
        save_model(model, path)  # lists the tied weight once
    else:
        save_file(model.state_dict(), path)
    model.train()
    io[f"{name}.y_train"] = model(x).detach()
    for key, t in model.state_dict().items():
        if "running" in key or "tracked" in key:
            io[f"{name}.{key}"] = t
save_file(io, here / "interchange_io.safetensors")
