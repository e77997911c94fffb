local helper = require "spec.helper"

---Runs tmodrun with these arguments (a shell text): exit code, standard output, standard error.
local function tmodrun(arguments, input)
  return helper.shell(("%s %s %s"):format(helper.tmodrun, helper.jit, arguments), input)
end

---Runs a script that prints "ready"; then sends SIGINT, and a second one when told so (seconds later).
local function interrupted(options, script, second)
  local command = [[
    %s %s %s &
    pid=$!
    until grep -q ready %%OUT || ! kill -0 $pid 2>/dev/null; do sleep 0.02; done
    sleep 0.1
    kill -INT $pid
    %s
    wait $pid]]
  local again = second and ("sleep %g; kill -INT $pid 2>/dev/null"):format(second) or ""
  return helper.shell(command:format(helper.tmodrun, options, helper.file(script), again))
end

-- Every loop below ends by itself after a while, so that a missed interrupt fails the spec and does not hang it.
local preamble = "io.stdout:write 'ready\\n'; io.stdout:flush(); local stop = os.time() + 20\n"

describe("tmodrun", function()
  it("passes the arguments to the script, as `...` and in arg", function()
    local script = helper.file "print(arg[0] == ..., select(2, ...)); print(#arg, arg[1] == arg[0], arg[2], arg[-1] ~= nil)"
    local code, out, err = tmodrun(("%s %s two 'three and'"):format(script, script))
    assert.equal("true\ttwo\tthree and\n3\ttrue\ttwo\ttrue\n", out)
    assert.equal("", err)
    assert.equal(0, code)
  end)

  it("numbers what stands before the script negatively", function()
    local script = helper.file "print(arg[-1], arg[-2], arg[-3])"
    local _, out = helper.shell(("%s -e '' -- %s"):format(helper.tmodrun, script))
    assert.equal("--\t\t-e\n", out)
  end)

  it("runs -e and -l in their order, before the script", function()
    local script = helper.file "print(x, bits.bor(1, 2))"
    local _, out = tmodrun("-e 'x = 1' -l bits=bit -e'x = x + 1' " .. script)
    assert.equal("2\t3\n", out)
  end)

  it("finds tmod from any directory", function()
    local command = "cd / && %s -e 'print(require \"tmod\" ~= nil)'"
    local code, out, err = helper.shell(command:format(helper.tmodrun))
    assert.equal("", err)
    assert.equal("true\n", out)
    assert.equal(0, code)
  end)

  it("runs standard input when it is no terminal, or for -", function()
    local code, out = tmodrun("", "print('piped', ...)")
    assert.equal("piped\n", out)
    assert.equal(0, code)
    code, out = tmodrun("- a b", "print('piped', arg[0], ...)")
    assert.equal("piped\t-\ta\tb\n", out)
    assert.equal(0, code)
  end)

  it("prints its version and its help", function()
    local code, out = tmodrun "--version"
    assert.matches("^tmod %d+%.%d+%.%d+, LuaJIT 2%.1", out)
    assert.equal(0, code)
    code, out = tmodrun "--help"
    assert.matches("^usage: tmodrun", out)
    assert.equal(0, code)
  end)

  it("refuses unknown and incomplete options before it runs anything", function()
    for _, options in ipairs {"-e 'print(1)' --nonsense", "-e 'print(1)' -e", "-x", "-l"} do
      local code, out, err = tmodrun(options)
      assert.equal(2, code)
      assert.equal("", out)
      assert.matches("usage: tmodrun", err)
    end
  end)

  it("hands -j and -O to LuaJIT", function()
    local _, out = helper.shell(helper.tmodrun .. " -joff -e 'print((jit.status()))' -jon -e 'print((jit.status()))'")
    assert.equal("false\ntrue\n", out)
    assert.equal(0, (helper.shell(helper.tmodrun .. " -Ohotloop=2,hotexit=3 -e ''")))
    local code, _, err = helper.shell(helper.tmodrun .. " -Ononsense=1 -e ''")
    assert.equal(1, code)
    assert.matches("nonsense", err)
  end)
end)

describe("tmodrun exit codes", function()
  it("are those of os.exit", function()
    assert.equal(7, (tmodrun "-e 'os.exit(7)'"))
    assert.equal(0, (tmodrun "-e 'os.exit(true)'"))
    assert.equal(1, (tmodrun "-e 'os.exit(false)'"))
  end)

  it("are 1 for an error, a chunk that does not compile, and a file that is not there", function()
    local code, out, err = tmodrun "-e 'error \"no\"' -e 'print(1)'"
    assert.equal(1, code)
    assert.equal("", out)
    assert.matches("^tmodrun: %(command line%):1: no\n", err)
    code, out, err = tmodrun "-e 'x ='"
    assert.equal(1, code)
    assert.equal("tmodrun: (command line):1: unexpected symbol near '<eof>'\n", out .. err)
    code, out, err = tmodrun "/nonexistent/script.lua"
    assert.equal(1, code)
    assert.matches("cannot open /nonexistent/script.lua", out .. err)
    assert.equal(1, (tmodrun "-l nonexistent.module"))
  end)
end)

describe("tmodrun tracebacks", function()
  it("begin and end in the user's script", function()
    local script = helper.file [[
      local function inner(x)
        error "lost"
      end
      local function outer()
        inner(1)
        return 1
      end
      outer()]]
    local code, _, err = tmodrun(script)
    assert.equal(1, code)
    assert.equal([[
tmodrun: FILE:2: lost
stack traceback:
	FILE:2: in function 'inner'
	FILE:5: in function 'outer'
	FILE:8: in main chunk
]], (err:gsub(script:gsub("%p", "%%%0"), "FILE")))
  end)

  it("do not show tmod's own files for a failing operator", function()
    local code, _, err = tmodrun(helper.file [[
      local tm = require "tmod"
      local a = tm.zeros(2, 3)
      local function f()
        local b = a:matmul(a)
        return b
      end
      f()]])
    assert.equal(1, code)
    assert.matches("^tmodrun: [^\n]*:4: matmul: [^\n]*\nstack traceback:\n\t[^\n]*:4: in function 'f'\n", err)
    assert.is_nil(err:find("5.1/tmod/", 1, true))
    assert.is_nil(err:find("%[C%]"))
  end)

  it("leave out the middle of a deep stack", function()
    local script = helper.file "local function f(n)\n  if n == 0 then error 'deep' end\n  local x = f(n - 1)\n  return x\nend\nf(100)\n"
    local _, _, err = tmodrun(script)
    local _, lines = err:gsub("\n", "")
    assert.equal(2 + 12 + 1 + 10, lines)
    assert.matches("\n\t%.%.%.\n", err)
    assert.matches("in main chunk\n$", err)
  end)

  it("tell what an error object holds", function()
    local cases = {
      ["error(setmetatable({}, {__tostring = function() return 'speaks' end}))"] = "tmodrun: speaks\n",
      ["error {code = 3}"] = "tmodrun: %(error object is a table: {code = 3}%)\n",
      ["error()"] = "tmodrun: %(error object is a nil value%)\n",
      ["error(setmetatable({}, {__tostring = function() error 'x' end}))"] = "tmodrun: %(error object whose __tostring fails",
    }
    for script, pattern in pairs(cases) do
      local code, _, err = tmodrun(helper.file(script))
      assert.equal(1, code)
      assert.matches(pattern, err)
    end
  end)
end)

describe("tmodrun interrupts", function()
  it("stop a plain loop in the interpreter, with a traceback", function()
    local code, _, err = interrupted("-joff", preamble .. "local function work()\n  while os.time() < stop do end\nend\nwork()\n")
    assert.equal(130, code)
    assert.matches("^tmodrun: [^\n]*:3: interrupted!\nstack traceback:\n\t[^\n]*:3: in function 'work'\n", err)
    assert.matches("\n\t[^\n]*:5: in main chunk\n$", err)
  end)

  it("stop a loop of operators, compiled or not", function()
    local script = preamble .. [[
      local tm = require "tmod"
      local a = tm.randn(256, 256)
      while os.time() < stop do local b = a:matmul(a) end
      os.exit(99)]]
    for _, options in ipairs {"-jon", "-joff"} do
      local code, _, err = interrupted(options, script)
      assert.equal(130, code)
      assert.matches("^tmodrun: [^\n]*interrupted", err)
      assert.matches("stack traceback:\n\t[^\n]*: in main chunk\n$", err)
    end
  end)

  it("stop a long backward pass", function()
    local code, _, err = interrupted("", [[
      local tm = require "tmod"
      local w = tm.randn(192, 192):requires_grad_()
      local y = w
      for _ = 1, 2000 do y = y:matmul(w) end
      io.stdout:write "ready\n"
      io.stdout:flush()
      y:sum():backward()
      os.exit(99)]])
    assert.equal(130, code)
    assert.matches("interrupted", err)
  end)

  it("can be caught once, and come again", function()
    local script = preamble .. [[
      local function work() while os.time() < stop do end end
      print(pcall(work))
      work()]]
    local code, out, err = interrupted("-joff", script, 0.3)
    assert.equal(130, code)
    assert.matches("^ready\nfalse\t[^\n]*interrupted!\n$", out)
    assert.matches("interrupted!\nstack traceback", err)
  end)

  it("leave the process whole, wherever in a product they arrive", function()
    local script = helper.file [[
      local tm = require "tmod"
      local a = tm.randn(192, 192)
      local b = a:matmul(a)
      local function work(i)
        print(i)
        io.stdout:flush()
        while true do b = a:matmul(a) end
      end
      for i = 1, 20 do assert(not pcall(work, i)) end
      assert(b:equal(a:matmul(a)))]]
    local code, _, err = helper.shell(([[
      %s %s %s & pid=$!
      for i in $(seq 20); do
        until grep -qx $i %%OUT || ! kill -0 $pid 2>/dev/null; do sleep 0.01; done
        sleep 0.01; kill -INT $pid
      done
      wait $pid]]):format(helper.tmodrun, helper.jit, script))
    assert.equal("", err)
    assert.equal(0, code)
  end)

  it("wake a script that waits for input", function()
    local script = "io.stdout:write 'ready\\n'; io.stdout:flush(); local line = io.read(); print('read', line)"
    local command = [[
      mkfifo %%OUT.fifo; sleep 5 >%%OUT.fifo & writer=$!
      %s %s <%%OUT.fifo & pid=$!
      until grep -q ready %%OUT || ! kill -0 $pid 2>/dev/null; do sleep 0.02; done
      sleep 0.1; kill -INT $pid; wait $pid; code=$?; kill $writer; rm %%OUT.fifo; (exit $code)]]
    local code, out, err = helper.shell(command:format(helper.tmodrun, helper.file(script)))
    assert.equal(130, code)
    assert.equal("ready\n", out)
    assert.matches("interrupted!", err)
  end)

  it("end the process the second time, where a compiled loop calls no operator", function()
    local script = "io.stdout:write 'ready\\n'; io.stdout:flush(); local x = 0; for i = 1, 2e10 do x = x + i % 7 end os.exit(99)"
    local code, _, err = interrupted("-jon", script, 0.3)
    assert.equal(130, code) -- what a shell makes of SIGINT
    assert.equal("", err)
  end)
end)

describe("tmodrun -i", function()
  it("prints values of expressions and keeps globals", function()
    local code, out, err = tmodrun("-i", "1 + 1\nx = 5\nx, nil\n= x\n")
    assert.equal("> 2\n> > 5\tnil\n> 5\n> \n", out)
    assert.equal("", err)
    assert.equal(0, code)
  end)

  it("goes on reading unfinished input", function()
    local _, out, err = tmodrun("-i", "for i = 1, 2 do\nprint(i)\nend\n(1 +\n2)\n[[a\nb]]\n")
    assert.equal("> >> >> 1\n2\n> >> 3\n> >> a\nb\n> \n", out)
    assert.equal("", err)
  end)

  it("survives errors of every kind", function()
    local code, out, err = tmodrun("-i", [[
      error "one"
      x y
      setmetatable({}, {__tostring = function() error "two" end})
      nil + 1
      "fine"
    ]])
    assert.matches("one\n", err)
    assert.matches("stdin:1: '=' expected near 'y'\n", err)
    assert.matches("two\n", err)
    assert.matches("attempt to perform arithmetic on a nil value\n", err)
    assert.matches("fine\n> > \n$", out)
    assert.equal(0, code)
  end)

  it("has tm, nn and F at hand", function()
    local _, out = tmodrun("-i", "tm == require 'tmod', nn == tm.nn, F == tm.nn.functional\ntm.ones(2)\n")
    assert.matches("^> true\ttrue\ttrue\n> [^\n]*1[^\n]*1", out)
  end)

  it("follows a script", function()
    local _, out = tmodrun("-i " .. helper.file "y = 3", "y\n")
    assert.equal("> 3\n> \n", out)
  end)
end)
