---reference.lua: prints the table of operators: `tmodrun scripts/reference.lua` as Markdown, with --annotations as type
---annotations for a language server.

local reference = require "tmod.reference"
io.write(arg[1] == "--annotations" and reference.annotations() or reference.markdown())
