---Chapter 17 of docs/contracts/module.md: how modules print. Expected texts are PyTorch's, in Lua's spelling.
local tm = require "tmod"
require "spec.helper"

local nn = tm.nn

local Shown = nn.Module:extend "deep.pkg.Shown"
function Shown:init(text) self.text = text end
function Shown:extra_repr() return self.text end

local function print_of(m) return tostring(m) end

describe("tostring of a module", function()
  it("M223: has its name alone, one extra line beside it, or a line for each", function()
    assert.equal("ReLU()", print_of(nn.ReLU()))
    assert.equal("Linear(in_features=1, out_features=1, bias=true)", print_of(nn.Linear(1, 1)))
    assert.equal("Shown(\n  a\n  b\n)", print_of(Shown "a\nb"))
    assert.equal("Sequential(\n  (0): ReLU()\n)", print_of(nn.Sequential(nn.ReLU())))
    local m = Shown "one"
    m.child = nn.ReLU()
    assert.equal("Shown(\n  one\n  (child): ReLU()\n)", print_of(m))
  end)

  it("M18 M223 M224, case 26: prints empty child slots, but no empty parameters", function()
    local m = nn.Module()
    m:add_module "none"
    m:register_parameter "p"
    m:register_buffer("b", nil)
    assert.equal("Module(\n  (none): nil\n)", print_of(m))
  end)

  it("M224: moves a child's further lines in by two, keeps blank ones empty, repeats shared ones", function()
    local m = nn.Module()
    m.c = Shown "a\n\nb"
    assert.equal("Module(\n  (c): Shown(\n    a\n\n    b\n  )\n)", print_of(m))
    local relu = nn.ReLU()
    assert.equal("Sequential(\n  (0): ReLU()\n  (1): Sequential(\n" ..
      "    (0): ReLU()\n    (deep): Sequential(\n      (0): ReLU()\n    )\n  )\n)",
      print_of(nn.Sequential(relu, nn.Sequential { { "0", relu }, { "deep", nn.Sequential(relu) } })))
  end)

  it("M225: leaves parameters and buffers out, and takes extra_repr of several lines", function()
    local m = nn.Module()
    m.p = nn.Parameter(tm.ones(1))
    m:register_buffer("b", tm.ones(1))
    assert.equal("Module()", print_of(m))
    assert.equal("", m:extra_repr())
    assert.equal("Shown()", print_of(Shown ""))
  end)

  it("M226, case 105: a ModuleList joins equal prints in a row", function()
    local function L() return nn.Linear(1, 2) end
    local line = "Linear(in_features=1, out_features=2, bias=true)"
    assert.equal("ModuleList(\n  (0-2): 3 x " .. line .. "\n  (3): ReLU()\n)", print_of(nn.ModuleList { L(), L(), L(), nn.ReLU() }))
    assert.equal("ModuleList()", print_of(nn.ModuleList()))
    assert.equal("ModuleList(\n  (0): ReLU()\n)", print_of(nn.ModuleList { nn.ReLU() }))
    local two = nn.Sequential(nn.ReLU(), nn.Tanh())
    assert.equal("ModuleList(\n  (0): ReLU()\n  (1-2): 2 x Sequential(\n    (0): ReLU()\n    (1): Tanh()\n  )\n  (3): ReLU()\n)",
      print_of(nn.ModuleList { nn.ReLU(), two, two, nn.ReLU() }))
    local Own = nn.ModuleList:extend "Own"
    function Own:extra_repr() return "not shown" end
    assert.equal("Own(\n  (0-1): 2 x ReLU()\n)", print_of(Own { nn.ReLU(), nn.ReLU() }))
  end)

  it("M227: a ParameterList tells what each element is", function()
    assert.equal([[
ParameterList(
    (0): Parameter containing: [float32 of size 2]
    (1): Object of type: string
    (2): Object of type: Linear
    (3): Parameter containing: [float64 of size 2x3]
    (4): Parameter containing: [float32 of size ]
  (2): Linear(in_features=2, out_features=2, bias=true)
)]], print_of(nn.ParameterList { tm.ones(2), "foo", nn.Linear(2, 2), tm.zeros(2, 3, { dtype = "float64" }), tm.tensor(1) }))
    assert.equal("ParameterList(  (0): Parameter containing: [float32 of size 2])", print_of(nn.ParameterList { tm.ones(2) }))
    assert.equal("ParameterList()", print_of(nn.ParameterList()))
    assert.equal("ParameterList(  (0): Parameter containing: [float32 of size 2 (meta)])", print_of(nn.ParameterList { tm.ones(2,
      { device = "meta" }) }))
  end)

  it("M227: a ParameterDict tells what each key holds", function()
    local d = nn.ParameterDict { { "b", tm.ones(2) }, { "a", nn.None }, { "s", "x" } }
    assert.equal("ParameterDict(\n    (b): Parameter containing: [float32 of size 2]\n" ..
      "    (a): Object of type: nil\n    (s): Object of type: string\n)", print_of(d))
  end)

  it("M228: uses Lua's words, dtypes by name, the class without its package, and positions as names", function()
    assert.equal("Shown(x)", print_of(Shown "x"))
    assert.equal("Linear(in_features=2, out_features=3, bias=false)", print_of(nn.Linear(2, 3, { bias = false })))
    assert.equal("BatchNorm1d(4, eps=1e-05, momentum=nil, affine=true, bias=true, track_running_stats=true)",
      print_of(nn.BatchNorm1d(4, { momentum = false })))
    assert.equal("Dropout(p=0.3, inplace=false)", print_of(nn.Dropout(0.3)))
    assert.equal("Dropout(p=0.5, inplace=true)", print_of(nn.Dropout { inplace = true }))
    assert.equal("Sequential(\n  (conv): ReLU()\n  (1): ReLU()\n)", print_of(nn.Sequential { { "conv", nn.ReLU() }, { "1", nn.ReLU() } }))
    assert.equal("ModuleDict(\n  (b): ReLU()\n)", print_of(nn.ModuleDict { b = nn.ReLU() }))
  end)
end)
