std = "luajit"
max_line_length = 140
self = false -- a method that overrides another takes self, used or not
ignore = {"581"} -- "not (x <= y)" is written where NaN must fail
files["spec"] = {std = "luajit+busted", globals = {"io.stderr"}} -- specs catch what is written there
exclude_files = {"build", "spec/golden"} -- figures made by another program
