std = "luajit"
max_line_length = 140
self = false -- a method that overrides another takes self, used or not
files["spec"] = {std = "luajit+busted"}
exclude_files = {"build"}
