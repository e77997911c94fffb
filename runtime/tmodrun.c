/* tmodrun.c: runs Lua programs with tmod at hand.
**
** Beside what luajit does: `require "tmod"` finds the files that belong to this executable, tracebacks begin
** at the user's own line, and Ctrl-C stops operators too. An interrupt is one token, held by the library
** (tm_interrupt): the next operator takes it and fails, or the next line of the user's code takes it in a
** hook, whichever comes first. The library's own Lua code is never stopped between two operators, so its
** tables stay whole. Compiled loops run no hooks: where one calls no operator, the second Ctrl-C ends the
** process. */
#include <errno.h>
#include <lauxlib.h>
#include <limits.h>
#include <lua.h>
#include <luajit.h>
#include <lualib.h>
#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#ifdef TM_LIBEDIT
#include <editline/readline.h>
#endif

#include "tmod.h"

enum { EXIT_USAGE = 2, EXIT_INTERRUPT = 130 };

static lua_State *state;             /* for the signal handler */
static char root[PATH_MAX + 32];     /* "<prefix>/share/lua/5.1/" */
static volatile sig_atomic_t prompt; /* what a Ctrl-C meets: */
enum { PROMPT_NONE, PROMPT_PLAIN, PROMPT_EDIT };
static sigjmp_buf prompt_escape;
static int exit_code;

static const char usage[] = "usage: tmodrun [options] [script [args]]\n"
                            "  -e CODE      run CODE\n"
                            "  -l MODULE    require MODULE into a global of its name (-l NAME=MODULE: of that name)\n"
                            "  -i           go on at the prompt afterwards\n"
                            "  -j CMD       control the JIT compiler: on, off, flush, v, dump ...\n"
                            "  -O OPTIONS   set its parameters: -Ohotloop=1\n"
                            "  --version    print the version\n"
                            "  --help       print this text\n"
                            "  --           end of options\n"
                            "  -            run standard input\n"
                            "Without script and -e: the prompt on a terminal, else standard input is run.\n";

/* -- Stack ------------------------------------------------------------------------------------------------ */

/* Code that the user wrote, as opposed to C functions, tmod's own files, and what tmod generates ("[tmod ...]"). */
static bool is_user(const lua_Debug *ar) {
  size_t n = strlen(root);
  if (*ar->what == 'C' || !strncmp(ar->source, "=[tmod", 6)) return false;
  return ar->source[0] != '@' || strncmp(ar->source + 1, root, n) || strncmp(ar->source + 1 + n, "tmod/", 5);
}

static bool frame_at(lua_State *L, int level, lua_Debug *ar) { return lua_getstack(L, level, ar) && lua_getinfo(L, "nSl", ar); }

static void push_frame(lua_State *L, const lua_Debug *ar) {
  lua_pushfstring(L, "\n\t%s:", ar->short_src);
  if (ar->currentline > 0) lua_pushfstring(L, "%d:", ar->currentline);
  else lua_pushliteral(L, "");
  if (*ar->namewhat) lua_pushfstring(L, " in function '%s'", ar->name);
  else if (*ar->what == 'm') lua_pushliteral(L, " in main chunk");
  else if (*ar->what == 'C') lua_pushliteral(L, " in a C function");
  else lua_pushfstring(L, " in function <%s:%d>", ar->short_src, ar->linedefined);
  lua_concat(L, 3);
}

/* Pushes the calls from the first line of the user's code to the last; beyond 22 the middle is left out. */
static void push_traceback(lua_State *L) {
  enum { HEAD = 12, TAIL = 10 };
  lua_Debug ar;
  int first = -1, last = -1, parts = 1;
  for (int level = 0; frame_at(L, level, &ar); level++) {
    if (!is_user(&ar)) continue;
    if (first < 0) first = level;
    last = level;
  }
  luaL_checkstack(L, HEAD + TAIL + 8, "traceback");
  lua_pushliteral(L, "");
  if (first < 0) return;
  lua_pushliteral(L, "\nstack traceback:");
  for (int level = first; level <= last && frame_at(L, level, &ar); level++, parts++) {
    push_frame(L, &ar);
    if (level != first + HEAD - 1 || last - level <= TAIL) continue;
    lua_pushliteral(L, "\n\t...");
    level = last - TAIL;
    parts++;
  }
  lua_concat(L, parts + 1);
}

/* -- Errors ----------------------------------------------------------------------------------------------- */

/* Pushes "{code = 3, ...}": the plain fields of a table that has no text of its own. */
static void push_fields(lua_State *L, int table) {
  int n = 0, text = lua_gettop(L) + 1;
  lua_pushliteral(L, "{");
  lua_pushnil(L);
  for (; lua_next(L, table) && n < 8; lua_pop(L, 1)) {
    const char *value = lua_type(L, -1) == LUA_TBOOLEAN ? lua_toboolean(L, -1) ? "true" : "false" : lua_tostring(L, -1);
    if (lua_type(L, -2) != LUA_TSTRING || !value) continue;
    lua_pushfstring(L, "%s%s%s = %s", lua_tostring(L, text), n++ ? ", " : "", lua_tostring(L, -2), value);
    lua_replace(L, text);
  }
  lua_settop(L, text);
  lua_pushliteral(L, "}");
  lua_concat(L, 2);
}

/* Pushes the text of the error value at index 1. */
static void push_message(lua_State *L) {
  if (lua_isstring(L, 1)) {
    lua_pushvalue(L, 1);
  } else if (luaL_getmetafield(L, 1, "__tostring")) {
    lua_pushvalue(L, 1);
    if (lua_pcall(L, 1, 1, 0) || !lua_isstring(L, -1))
      lua_pushfstring(L, "(error object whose __tostring fails: %s)", luaL_typename(L, -1));
  } else if (lua_istable(L, 1)) {
    push_fields(L, 1);
    lua_pushfstring(L, "(error object is a table: %s)", lua_tostring(L, -1));
  } else {
    lua_pushfstring(L, "(error object is a %s value)", luaL_typename(L, 1));
  }
}

static bool is_interrupt(lua_State *L) {
  size_t n;
  const char *s;
  if (lua_type(L, 1) == LUA_TSTRING) {
    s = lua_tolstring(L, 1, &n);
    return n >= 12 && !strcmp(s + n - 12, "interrupted!");
  }
  if (!lua_istable(L, 1)) return false;
  lua_pushliteral(L, "kind");
  lua_rawget(L, 1);
  s = lua_tostring(L, -1);
  bool is = s && !strcmp(s, "Interrupted");
  lua_pop(L, 1);
  return is;
}

/* Message handler: what an uncaught error prints. */
static int explain(lua_State *L) {
  exit_code = is_interrupt(L) ? EXIT_INTERRUPT : EXIT_FAILURE;
  push_message(L);
  push_traceback(L);
  lua_concat(L, 2);
  return 1;
}

/* -- Ctrl-C ----------------------------------------------------------------------------------------------- */

static void catch_interrupt(void);

static void stop(lua_State *L, lua_Debug *unused) {
  lua_Debug ar;
  int level = 0;
  (void)unused;
  while (frame_at(L, level, &ar) && *ar.what == 'C') level++;
  if (!frame_at(L, level, &ar) || !is_user(&ar)) return;
  lua_sethook(L, NULL, 0, 0);
  catch_interrupt();
  if (!tm_interrupt_take()) return; /* an operator has failed with it */
  lua_pushfstring(L, "%s:%d: interrupted!", ar.short_src, ar.currentline);
  lua_error(L);
}

static void on_interrupt(int sig) {
  signal(sig, SIG_DFL);
  if (prompt == PROMPT_EDIT) siglongjmp(prompt_escape, 1);
  if (prompt == PROMPT_PLAIN) return;
  tm_interrupt();
  lua_sethook(state, stop, LUA_MASKCALL | LUA_MASKRET | LUA_MASKCOUNT, 1);
}

/* Without SA_RESTART, so that a script that waits for input or sleeps is woken. On a stack of its own: oneDNN's
** kernels use the stack pointer for other things, and a signal frame there overwrites the heap. */
static void catch_interrupt(void) {
  struct sigaction action = {.sa_handler = on_interrupt, .sa_flags = SA_ONSTACK};
  sigaction(SIGINT, &action, NULL);
}

static void set_signal_stack(void) {
  static char memory[1 << 16];
  stack_t stack = {.ss_sp = memory, .ss_size = sizeof memory}, old;
  if (sigaltstack(NULL, &old) == 0 && old.ss_flags & SS_DISABLE) sigaltstack(&stack, NULL); /* else the sanitizer has set one */
}

static void forget_interrupt(void) {
  lua_sethook(state, NULL, 0, 0);
  tm_interrupt_take();
  catch_interrupt();
}

/* -- The prompt (lua/repl.lua) ------------------------------------------------------------------------------ */

/* call(f, ...): true and the results, or false and the message with its traceback. */
static int call(lua_State *L) {
  lua_pushcfunction(L, explain);
  lua_insert(L, 1);
  int status = lua_pcall(L, lua_gettop(L) - 2, LUA_MULTRET, 1);
  lua_pushboolean(L, status == 0);
  lua_replace(L, 1);
  exit_code = EXIT_SUCCESS;
  forget_interrupt();
  return lua_gettop(L);
}

static char *plain_line(const char *text) {
  char *line = NULL;
  size_t capacity = 0;
  fputs(text, stdout);
  fflush(stdout);
  prompt = PROMPT_PLAIN;
  errno = 0;
  ssize_t n = getline(&line, &capacity, stdin);
  prompt = PROMPT_NONE;
  if (n > 0) {
    if (line[n - 1] == '\n') line[n - 1] = 0;
    return line;
  }
  free(line);
  return NULL;
}

#ifdef TM_LIBEDIT
static char *edited_line(const char *text) {
  rl_catch_signals = 0;
  if (sigsetjmp(prompt_escape, 1)) { /* libedit goes on reading after EINTR: leave it by a jump */
    prompt = PROMPT_NONE;
    fputc('\n', stdout);
    errno = EINTR;
    return NULL;
  }
  prompt = PROMPT_EDIT;
  errno = 0;
  char *line = readline(text);
  prompt = PROMPT_NONE;
  if (!line) errno = 0;
  else if (*line) add_history(line);
  return line;
}
#endif

/* read(prompt): a line; false after Ctrl-C; nil at the end. */
static int read_line(lua_State *L) {
  const char *text = luaL_checkstring(L, 1);
#ifdef TM_LIBEDIT
  char *line = isatty(STDIN_FILENO) ? edited_line(text) : plain_line(text);
#else
  char *line = plain_line(text);
#endif
  if (line) {
    lua_pushstring(L, line);
    free(line);
  } else if (errno == EINTR) {
    clearerr(stdin);
    lua_pushboolean(L, 0);
  } else {
    lua_pushnil(L);
  }
  forget_interrupt();
  return 1;
}

/* -- Running ------------------------------------------------------------------------------------------------ */

static int report(lua_State *L, int status) {
  if (status) {
    const char *message = lua_tostring(L, -1);
    if (message && !strncmp(message, "[tmodrun]:", 10)) message = strstr(message, ": ") + 2; /* a position in run_text */
    fflush(stdout);
    fprintf(stderr, "tmodrun: %s\n", message ? message : "(no message)");
    lua_settop(L, 0);
    if (!exit_code) exit_code = EXIT_FAILURE; /* it did not compile */
  }
  return status;
}

/* Calls the function below `nargs` values, or reports why the chunk did not load (status). */
static int run(lua_State *L, int status, int nargs) {
  if (!status) {
    int at = lua_gettop(L) - nargs;
    lua_pushcfunction(L, explain);
    lua_insert(L, at);
    status = lua_pcall(L, nargs, 0, at);
    if (!status) lua_settop(L, at - 1);
  }
  return report(L, status);
}

/* A piece of Lua of our own, which must not fail, with the strings given. */
static int run_text(lua_State *L, const char *code, const char *a, const char *b) {
  int status = luaL_loadbuffer(L, code, strlen(code), "=[tmodrun]");
  lua_pushstring(L, a);
  lua_pushstring(L, b);
  return run(L, status, 2);
}

static int run_script(lua_State *L, char **argv, int script) {
  const char *name = argv[script];
  int nargs = 0, status = luaL_loadfile(L, strcmp(name, "-") ? name : NULL);
  if (!status) {
    while (argv[script + 1 + nargs]) nargs++;
    luaL_checkstack(L, nargs + 4, "too many arguments");
    for (int i = 1; i <= nargs; i++) lua_pushstring(L, argv[script + i]);
  }
  return run(L, status, nargs);
}

static int run_prompt(lua_State *L) {
  if (isatty(STDIN_FILENO)) printf("tmod %s, %s\n", tm_version(), LUAJIT_VERSION);
  lua_getglobal(L, "require");
  lua_pushliteral(L, "tmod.repl");
  int status = lua_pcall(L, 1, 1, 0);
  lua_pushcfunction(L, read_line);
  lua_pushcfunction(L, call);
  return run(L, status, 2);
}

/* arg[0] is the script, what came before it has negative indices. */
static void set_arg(lua_State *L, char **argv, int argc, int script) {
  lua_createtable(L, argc, 0);
  for (int i = 0; i < argc; i++) {
    lua_pushstring(L, argv[i]);
    lua_rawseti(L, -2, i - script);
  }
  lua_setglobal(L, "arg");
}

static bool set_root(void) {
  ssize_t n = readlink("/proc/self/exe", root, PATH_MAX);
  if (n <= 0) return false;
  root[n] = 0;
  for (int up = 0; up < 2; up++) {
    char *slash = strrchr(root, '/');
    if (!slash) return false;
    *slash = 0;
  }
  strcat(root, "/share/lua/5.1/");
  return true;
}

/* Deep models make many traces (docs/luajit.md): LuaJIT's own limits would flush them over and over. */
static const char setup[] = "local root = ...\n"
                            "if root then package.path = root .. '?.lua;' .. root .. '?/init.lua;' .. package.path end\n"
                            "if jit.opt then jit.opt.start('maxtrace=8000', 'maxrecord=16000', 'maxmcode=40960', 'maxirconst=2000') end\n";
static const char require_global[] = "local spec = ...\n"
                                     "local name, module = spec:match '^([^=]+)=(.+)$'\n"
                                     "_G[name or spec] = require(module or spec)\n";
static const char jit_command[] = "local name, options = (...):match '^([^=]+)=?(.*)$'\n"
                                  "if name == 'on' or name == 'off' or name == 'flush' then jit[name]()\n"
                                  "else require('jit.' .. name).start(options ~= '' and options or nil) end\n";
static const char jit_options[] = "local list = {}\n"
                                  "for option in (...):gmatch '[^,]+' do list[#list + 1] = option end\n"
                                  "jit.opt.start(unpack(list))\n";

static const char *action_of(char letter) {
  return letter == 'l' ? require_global : letter == 'j' ? jit_command : letter == 'O' ? jit_options : NULL;
}

static int fail_usage(const char *what, const char *option) {
  fprintf(stderr, "tmodrun: %s: %s\n%s", what, option, usage);
  return EXIT_USAGE;
}

typedef struct options {
  int script;
  bool prompt, code;
} options; /* script == argc: none */

/* Checks every option before any is carried out. -1: go on; else the exit code. */
static int parse(int argc, char **argv, options *o) {
  int i = 1;
  for (; i < argc && argv[i][0] == '-' && argv[i][1]; i++) {
    const char *option = argv[i];
    if (!strcmp(option, "--")) {
      i++;
      break;
    }
    if (!strcmp(option, "--help") || !strcmp(option, "-h")) return fputs(usage, stdout), EXIT_SUCCESS;
    if (!strcmp(option, "--version") || !strcmp(option, "-v")) return printf("tmod %s, %s\n", tm_version(), LUAJIT_VERSION), EXIT_SUCCESS;
    if (!strcmp(option, "-i")) {
      o->prompt = true;
      continue;
    }
    if (option[1] != 'e' && !action_of(option[1])) return fail_usage("unknown option", option);
    if (option[1] == 'e') o->code = true;
    if (!option[2] && !argv[++i]) return fail_usage("option needs a value", option);
  }
  o->script = i;
  return -1;
}

static int run_options(lua_State *L, char **argv, int end) {
  int status = 0;
  for (int i = 1; i < end && !status; i++) {
    char letter = argv[i][1];
    if (letter == '-' || letter == 'i') continue;
    const char *value = argv[i][2] ? argv[i] + 2 : argv[++i];
    if (letter == 'e') status = run(L, luaL_loadbuffer(L, value, strlen(value), "=(command line)"), 0);
    else status = run_text(L, action_of(letter), value, NULL);
  }
  return status;
}

int main(int argc, char **argv) {
  options o = {0};
  int code = parse(argc, argv, &o);
  if (code >= 0) return code;
  lua_State *L = state = luaL_newstate();
  if (!L) return fputs("tmodrun: not enough memory\n", stderr), EXIT_FAILURE;
  luaL_openlibs(L);
  bool found = set_root(), has_script = o.script < argc;
  set_arg(L, argv, argc, o.script);
  set_signal_stack();
  catch_interrupt();
  int status = run_text(L, setup, found ? root : NULL, NULL);
  if (!status) status = run_options(L, argv, o.script);
  if (!status && has_script) status = run_script(L, argv, o.script);
  bool nothing = !has_script && !o.code;
  if (o.prompt || (nothing && isatty(STDIN_FILENO))) {
    exit_code = 0;
    run_prompt(L);
  } else if (!status && nothing) {
    run(L, luaL_loadfile(L, NULL), 0);
  }
  signal(SIGINT, SIG_DFL);
  lua_close(L);
  return exit_code;
}
