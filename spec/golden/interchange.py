"""The models of interchange.lua in PyTorch, for make_interchange.py and check_interchange.py."""

import collections

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(5, 7)
        tail = collections.OrderedDict(act=nn.ReLU(), out=nn.Linear(4, 3))
        self.body = nn.Sequential(nn.Tanh(), nn.Linear(7, 4, bias=False), nn.Sequential(tail))

    def forward(self, x):
        return self.body(self.fc1(x))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.decoder = nn.Linear(4, 4)
        self.decoder.weight = self.encoder.weight
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("temporary", torch.ones(2), persistent=False)
        self.double()

    def forward(self, x):
        return self.decoder(self.encoder(x).sigmoid()) * self.scale


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.ln = nn.LayerNorm(6)
        self.bn = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 2)

    def forward(self, ids):
        """ids: (B, T), counted from 0"""
        return self.head(self.bn(self.ln(self.embed(ids)).mean(1)))


MODELS = {"mlp": Net, "tied": Tied, "norms": Norms}
