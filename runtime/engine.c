/* engine.c: walks over the graph. A backward pass runs nodes from the last made to the first and sums gradients
** on the way; it returns to Lua for hooks and custom nodes, and is resumed with the answer. At the end of the file,
** the walk that finds which of Lua's functions only the graph keeps alive. */
#include "graph.h"

/* -- formulas ----------------------------------------------------------------------------------------------------------- */

tm_tensor *v_keep(tm_vjp *v, tm_tensor *t) {
  if (!t) {
    v->failed = 1;
    return NULL;
  }
  if (v->ntemp == v->captemp) {
    int cap = TM_MAX(16, v->captemp * 2);
    tm_tensor **more = tm_host_realloc(v->temp, (size_t)cap * sizeof *more);
    if (!more) {
      tm_tensor_release(t);
      v->failed = 1;
      return NULL;
    }
    v->temp = more, v->captemp = cap;
  }
  return v->temp[v->ntemp++] = t;
}

tm_tensor *v_run(tm_vjp *v, int op, int nin, tm_tensor **in, const double *a, const int64_t *const *list) {
  if (v->failed) return NULL;
  return v_keep(v, tm_op_run(op, nin, in, a, list));
}

/* Shape and dtype of a gradient made those of the value: broadcast dims are summed, dtypes converted. */
static tm_tensor *fit(tm_vjp *v, tm_tensor *g, const tm_inmeta *m, int which) {
  int64_t dims[TM_MAXDIM];
  int lead = g->c.ndim - m->ndim, n = 0;
  bool same = lead == 0;
  if (lead < 0) goto bad;
  for (int i = 0; i < g->c.ndim; i++) {
    int64_t want = i < lead ? 1 : m->size[i - lead];
    if (g->c.size[i] != want) {
      if (want != 1) goto bad;
      dims[n++] = i;
      same = false;
    } else if (i < lead) {
      dims[n++] = i;
    }
  }
  if (!same) {
    if (n) g = v_sum(v, g, n, dims, 1);
    g = v_reshape(v, g, m->ndim, m->size);
  }
  if (g && g->c.dtype != m->dtype) g = v_cast(v, g, m->dtype);
  return g;
bad : {
  char text[160];
  return tm_fail_null(TM_ERUNTIME, "%s: backward gave a gradient %s for input %d of shape %s", tm_node_name(v->node), tm_say(g), which + 1,
                      tm_shape_text(text, sizeof text, m->ndim, m->size));
}
}

/* -- the engine ----------------------------------------------------------------------------------------------------------- */

typedef struct entry {
  tm_node *node;  /* retained */
  int deps;       /* edges of this pass into the node that have not delivered */
  uint8_t wanted; /* leads to an input that was asked for (or all are) */
  uint8_t queued;
  tm_tensor **grad; /* [nout] sums so far; retained */
  tm_tensor *one;   /* grad of a node with one result */
} entry;

enum phase { PHASE_PICK, PHASE_HOOKS, PHASE_RUN, PHASE_CUSTOM, PHASE_POST };

struct tm_engine {
  entry *entry;
  int nentry, capentry;
  int *table, ntable; /* open addressing: node -> entry */
  int *heap, nheap, capheap;
  int retain, create, accumulate;
  int ninput;
  tm_edge *input;     /* edges of the asked-for tensors */
  tm_tensor **result; /* [ninput] */
  enum phase phase;
  int current;  /* entry being run */
  hook *hook;   /* next hook to look at */
  int hook_out; /* its position in entry.grad */
  int64_t hook_id;
  tm_tensor *event_grad[1];
  int ncsaved, ncresult;
  tm_tensor **csaved, **cresult; /* what a custom node gets and gives; retained */
};

static int find_slot(const tm_engine *e, const tm_node *n) {
  size_t h = ((uintptr_t)n >> 4) * 0x9E3779B97F4A7C15ull >> 20;
  for (int i = (int)(h & (size_t)(e->ntable - 1));; i = (i + 1) & (e->ntable - 1))
    if (e->table[i] < 0 || e->entry[e->table[i]].node == n) return i;
}

static int grow_table(tm_engine *e) {
  int n = e->ntable ? e->ntable * 2 : 64;
  int *t = tm_host_alloc((size_t)n * sizeof *t);
  if (!t) return TM_EMEM;
  tm_host_free(e->table);
  e->table = t, e->ntable = n;
  memset(t, -1, (size_t)n * sizeof *t);
  for (int i = 0; i < e->nentry; i++) t[find_slot(e, e->entry[i].node)] = i;
  return TM_OK;
}

/* The entry of a node, or -1; with `add` it is made when missing (then -1 is out of memory). */
static int entry_of(tm_engine *e, tm_node *n, int add, int *added) {
  int s = e->ntable ? find_slot(e, n) : -1;
  if (s >= 0 && e->table[s] >= 0) return e->table[s];
  if (!add) return -1;
  if (e->nentry * 2 >= e->ntable) {
    if (grow_table(e) != TM_OK) return -1;
    s = find_slot(e, n);
  }
  if (e->nentry == e->capentry) {
    int cap = TM_MAX(32, e->capentry * 2);
    entry *more = tm_host_realloc(e->entry, (size_t)cap * sizeof *more);
    if (!more) return -1;
    e->entry = more, e->capentry = cap;
  }
  entry *x = &e->entry[e->nentry];
  *x = (entry){.node = n};
  if (n->nout > 1) {
    if (!(x->grad = tm_host_alloc((size_t)n->nout * sizeof *x->grad))) return -1;
    memset(x->grad, 0, (size_t)n->nout * sizeof *x->grad);
  }
  tm_node_retain(n);
  e->table[s] = e->nentry;
  if (added) *added = 1;
  return e->nentry++;
}

static tm_tensor **grads(entry *x) { return x->grad ? x->grad : &x->one; }

static int push(tm_engine *e, int i) {
  if (e->nheap == e->capheap) {
    int cap = TM_MAX(32, e->capheap * 2);
    int *more = tm_host_realloc(e->heap, (size_t)cap * sizeof *more);
    if (!more) return TM_EMEM;
    e->heap = more, e->capheap = cap;
  }
  int at = e->nheap++;
  int64_t seq = e->entry[i].node->seq;
  e->entry[i].queued = 1;
  for (; at > 0 && e->entry[e->heap[(at - 1) / 2]].node->seq < seq; at = (at - 1) / 2) e->heap[at] = e->heap[(at - 1) / 2];
  e->heap[at] = i;
  return TM_OK;
}

static int pop(tm_engine *e) {
  int top = e->heap[0], last = e->heap[--e->nheap], at = 0;
  int64_t seq = e->entry[last].node->seq;
  for (;;) {
    int child = 2 * at + 1;
    if (child >= e->nheap) break;
    if (child + 1 < e->nheap && e->entry[e->heap[child + 1]].node->seq > e->entry[e->heap[child]].node->seq) child++;
    if (e->entry[e->heap[child]].node->seq <= seq) break;
    e->heap[at] = e->heap[child];
    at = child;
  }
  e->heap[at] = last;
  return top;
}

/* Adds `g` (borrowed) to a sum. A sum that nobody else sees is changed in place. */
static int add_to(tm_tensor **sum, tm_tensor *g, int create) {
  if (!*sum) {
    tm_tensor_retain(g);
    *sum = g;
    return TM_OK;
  }
  tm_tensor *old = *sum, *in[2] = {old, g};
  bool mine = !create && old->refs == 1 && old->c.storage->refs == 1 && !tm_overlap(old) && old->c.dtype == g->c.dtype;
  tm_call c = {.op = &tm_ops[TM_OPC_add], .nin = 2, .in = in, .na = 1, .a = {1}, .inplace = mine};
  int code = tm_call_run(&c);
  if (code != TM_OK) return code;
  *sum = c.out[0];
  tm_tensor_release(old);
  return TM_OK;
}

/* Counts the edges that will deliver to each node, and finds which nodes matter. */
static int count_edges(tm_engine *e, int nroot, tm_tensor *const *root) {
  int *stack = NULL, n = 0, cap = 0, code = TM_OK;
  for (int i = 0; i < nroot; i++) {
    tm_edge edge;
    int added = 0, k;
    if ((code = tm_edge_of(root[i], &edge)) != TM_OK) goto done;
    k = entry_of(e, edge.node, 1, &added);
    tm_node_release(edge.node);
    if (k < 0) goto nomem;
    if (n == cap) {
      int *more = tm_host_realloc(stack, (size_t)(cap = TM_MAX(64, cap * 2)) * sizeof *more);
      if (!more) goto nomem;
      stack = more;
    }
    if (added) stack[n++] = k;
  }
  while (n > 0) {
    tm_node *node = e->entry[stack[--n]].node;
    for (int i = 0; i < node->nin; i++) {
      if (!node->edge[i].node) continue;
      int added = 0, k = entry_of(e, node->edge[i].node, 1, &added);
      if (k < 0) goto nomem;
      e->entry[k].deps++;
      if (!added) continue;
      if (n == cap) {
        int *more = tm_host_realloc(stack, (size_t)(cap = TM_MAX(64, cap * 2)) * sizeof *more);
        if (!more) goto nomem;
        stack = more;
      }
      stack[n++] = k;
    }
  }
  goto done;
nomem:
  code = TM_EMEM;
done:
  tm_host_free(stack);
  return code;
}

/* With inputs: a node is wanted if it is one of theirs or leads to one. Nodes are visited inputs before users
** by their order of creation, which edges respect (an edge leads to an older node, or to an accumulator). */
static int by_seq(const void *a, const void *b) {
  const entry *x = *(entry *const *)a, *y = *(entry *const *)b;
  return x->node->seq < y->node->seq ? -1 : x->node->seq > y->node->seq;
}

static int mark_wanted(tm_engine *e) {
  if (!e->ninput) {
    for (int i = 0; i < e->nentry; i++) e->entry[i].wanted = 1;
    return TM_OK;
  }
  for (int i = 0; i < e->ninput; i++) {
    int k = e->input[i].node ? entry_of(e, e->input[i].node, 0, NULL) : -1;
    if (k >= 0) e->entry[k].wanted = 1;
  }
  entry **order = tm_host_alloc((size_t)TM_MAX(e->nentry, 1) * sizeof *order);
  if (!order) return TM_EMEM;
  for (int i = 0; i < e->nentry; i++) order[i] = &e->entry[i];
  qsort(order, (size_t)e->nentry, sizeof *order, by_seq);
  for (int i = 0; i < e->nentry; i++)
    for (int j = 0; j < order[i]->node->nin && !order[i]->wanted; j++) {
      int k = order[i]->node->edge[j].node ? entry_of(e, order[i]->node->edge[j].node, 0, NULL) : -1;
      if (k >= 0 && e->entry[k].wanted) order[i]->wanted = 1;
    }
  tm_host_free(order);
  return TM_OK;
}

static int seed(tm_engine *e, int i, tm_tensor *root, tm_tensor *gradient) {
  tm_edge edge;
  char text[160];
  if (tm_edge_of(root, &edge) != TM_OK) return TM_EMEM;
  int k = entry_of(e, edge.node, 0, NULL), code;
  tm_node_release(edge.node);
  tm_tensor *g = gradient;
  if (g && (g->c.ndim != root->c.ndim || memcmp(g->c.size, root->c.size, (size_t)root->c.ndim * sizeof(int64_t))))
    return tm_fail(TM_ERUNTIME, "backward: gradient %d is %s, expected shape %s", i + 1, tm_say(g),
                   tm_shape_text(text, sizeof text, root->c.ndim, root->c.size));
  if (g && !tm_is_float(g->c.dtype)) return tm_fail(TM_ETYPE, "backward: gradient %d is %s, expected a floating dtype", i + 1, tm_say(g));
  if (g && g->c.device != root->c.device)
    return tm_fail(TM_ERUNTIME, "backward: gradient %d is %s, its tensor is %s; expected one device", i + 1, tm_say(g), tm_say(root));
  if (!g) {
    if (root->c.numel != 1) return tm_fail(TM_ERUNTIME, "backward: a gradient can be left out only for one element, got %s", tm_say(root));
    tm_call c = {
        .op = &tm_ops[TM_OPC_full], .nin = 0, .na = 4, .a = {root->c.ndim, 1, root->c.dtype, root->c.device}, .list = {root->c.size}};
    if ((code = tm_call_run(&c)) != TM_OK) return code;
    g = c.out[0];
  } else if (g->c.dtype != root->c.dtype) {
    if (!(g = tm_op_run(TM_OPC_cast, 1, &g, (double[]){root->c.dtype, -1}, NULL))) return tm_last_code();
  } else {
    tm_tensor_retain(g);
  }
  code = add_to(&grads(&e->entry[k])[edge.out_nr], g, e->create);
  tm_tensor_release(g);
  return code;
}

tm_engine *tm_engine_new(int nroot, tm_tensor *const *root, tm_tensor *const *gradient, int ninput, tm_tensor *const *input,
                         int retain_graph, int create_graph, int accumulate) {
  tm_engine *e = tm_host_alloc(sizeof *e);
  if (!e) return NULL;
  memset(e, 0, sizeof *e);
  e->retain = retain_graph, e->create = create_graph, e->accumulate = accumulate;
  int old = tm_grad_mode_set(create_graph);
  for (int i = 0; i < nroot; i++)
    if (!tm_tensor_requires_grad(root[i])) {
      tm_fail(TM_ERUNTIME, "backward: tensor %d, %s, does not require grad and was made by no recorded operator", i + 1, tm_say(root[i]));
      goto fail;
    }
  if (ninput) {
    e->input = tm_host_alloc((size_t)ninput * sizeof *e->input);
    e->result = tm_host_alloc((size_t)ninput * sizeof *e->result);
    if (!e->input || !e->result) goto fail;
    memset(e->input, 0, (size_t)ninput * sizeof *e->input);
    memset(e->result, 0, (size_t)ninput * sizeof *e->result);
    for (; e->ninput < ninput; e->ninput++) {
      tm_tensor *t = input[e->ninput];
      if (!tm_tensor_requires_grad(t)) {
        tm_fail(TM_ERUNTIME, "grad: input %d, %s, does not require grad", e->ninput + 1, tm_say(t));
        goto fail;
      }
      if (accumulate && t->c.fn) {
        tm_fail(TM_ERUNTIME, "backward: input %d, %s, is no leaf; use autograd.grad", e->ninput + 1, tm_say(t));
        goto fail;
      }
      if (tm_edge_of(t, &e->input[e->ninput]) != TM_OK) goto fail;
    }
  }
  if (count_edges(e, nroot, root) != TM_OK || mark_wanted(e) != TM_OK) goto fail;
  for (int i = 0; i < nroot; i++)
    if (seed(e, i, root[i], gradient ? gradient[i] : NULL) != TM_OK) goto fail;
  for (int i = 0; i < e->nentry; i++)
    if (e->entry[i].deps == 0 && e->entry[i].wanted && push(e, i) != TM_OK) goto fail;
  tm_grad_mode_set(old);
  return e;
fail:
  tm_grad_mode_set(old);
  tm_engine_free(e);
  return NULL;
}

static void free_custom(tm_engine *e) {
  for (int i = 0; e->csaved && i < e->ncsaved; i++) tm_tensor_release(e->csaved[i]);
  tm_host_free(e->csaved);
  e->csaved = NULL;
  for (int i = 0; e->cresult && i < e->ncresult; i++) tm_tensor_release(e->cresult[i]);
  tm_host_free(e->cresult);
  e->cresult = NULL;
  e->ncsaved = e->ncresult = 0;
}

void tm_engine_free(tm_engine *e) {
  if (!e) return;
  for (int i = 0; i < e->nentry; i++) {
    entry *x = &e->entry[i];
    for (int k = 0; k < x->node->nout; k++) tm_tensor_release(grads(x)[k]);
    tm_host_free(x->grad);
    tm_node_release(x->node);
  }
  for (int i = 0; i < e->ninput; i++) {
    tm_node_release(e->input[i].node);
    tm_tensor_release(e->result[i]);
  }
  free_custom(e);
  tm_host_free(e->entry);
  tm_host_free(e->table);
  tm_host_free(e->heap);
  tm_host_free(e->input);
  tm_host_free(e->result);
  tm_host_free(e);
}

tm_tensor *tm_engine_result(tm_engine *e, int i) {
  if (i < 0 || i >= e->ninput || !e->result[i]) return NULL;
  tm_tensor_retain(e->result[i]);
  return e->result[i];
}

/* A saved value, checked to be as it was. Borrowed; kept by v if it had to be made. */
static tm_tensor *unpack(tm_vjp *v, const saved *s) {
  tm_node *n = v->node;
  if (s->t->c.storage->version != s->version)
    return tm_fail_null(TM_ERUNTIME,
                        "%s: a value needed for its gradient, %s, was changed in place: it is at version %lld, expected version %lld%s%s",
                        tm_node_name(n), tm_say(s->t), (long long)s->t->c.storage->version, (long long)s->version,
                        n->where ? "; forward at " : "", n->where ? n->where : "");
  if (s->result < 0 || !tm_grad_mode()) return s->t;
  tm_tensor *t = tm_tensor_alias(s->t);
  if (!t) return NULL;
  tm_node_retain(n);
  t->c.fn = n, t->c.out_nr = s->result;
  return v_keep(v, t);
}

static int freed_error(const tm_node *n) {
  return tm_fail(TM_ERUNTIME,
                 "%s: backward a second time through a graph whose saved values have been freed; use {retain_graph = true} the first time",
                 tm_node_name(n));
}

/* Evaluates the formula of an operator's node. dy[nout] -> dx[nin], kept by v. */
static int apply_op(tm_vjp *v, tm_node *n, tm_tensor **dy, tm_tensor **room) {
  v->node = n, v->nin = n->nin, v->nout = n->nout;
  v->dy = dy, v->x = room, v->y = room + n->nin, v->dx = v->y + n->nout;
  v->xm = n->xm, v->layout = n->layout, v->a = n->a, v->list = (const int64_t *const *)n->list;
  for (int i = 0; i < n->nin; i++) v->x[i] = v->dx[i] = NULL;
  for (int k = 0; k < n->nout; k++) v->y[k] = NULL;
  for (int i = 0; i < n->nsaved; i++) {
    if (!n->saved[i].t) continue;
    tm_tensor *t = unpack(v, &n->saved[i]);
    if (!t) return tm_last_code();
    if (i < n->nin) v->x[i] = t;
    else v->y[i - n->nin] = t;
  }
  if (n->op->flags & TM_OP_FIRST_ORDER && tm_grad_mode())
    return tm_fail(TM_ENOTIMPL, "%s: its gradient cannot be differentiated again", n->op->name);
  int code = n->op->vjp(v);
  return code != TM_OK ? code : v->failed ? tm_last_code() : TM_OK;
}

/* The base's gradient is that outside the window, and inside what the in-place operator passes on. */
static int apply_window(tm_vjp *v, tm_node *n, tm_tensor **dy, tm_tensor **room, uint8_t *want) {
  const tm_inmeta *b = &n->xm[0], *w = &n->window;
  const int64_t *list[5] = {n->layout->stride, w->size, n->window_layout.stride}, *const *lw = list + 1;
  double nd = b->ndim, offset = (double)(n->window_layout.offset - n->layout->offset), aw[3] = {w->ndim, w->ndim, offset};
  v->node = n;
  tm_tensor *laid = v_run(v, TM_OPC_restride, 1, &dy[0], &nd, list);
  tm_tensor *part = v_run(v, TM_OPC_as_strided, 1, &laid, aw, lw), *inner_dy[TM_MAXOUT] = {part};
  if (v->failed) return tm_last_code();
  int code = apply_op(v, n->inner, inner_dy, room);
  v->node = n;
  if (code != TM_OK) return code;
  if (want[0]) {
    tm_tensor *d0 = v->dx[0] ? fit(v, v->dx[0], &n->inner->xm[0], 0) : v_zeros(v, &n->inner->xm[0]);
    tm_tensor *in[2] = {dy[0], d0};
    double a[5] = {b->ndim, w->ndim, w->ndim, offset, 0};
    v->dx[0] = d0 ? v_run(v, TM_OPC_fill_strided, 2, in, a, list) : NULL;
  }
  return v->failed ? tm_last_code() : TM_OK;
}

static int has_nan(tm_tensor *t) {
  int mode = tm_grad_mode_set(0);
  tm_tensor *nan = tm_op_run(TM_OPC_isnan, 1, &t, NULL, NULL), *any = NULL;
  double value = 0;
  if (nan) any = tm_op_run(TM_OPC_any, 1, &nan, (double[]){-1, 0}, NULL);
  if (any) tm_tensor_get(any, 0, &value);
  tm_tensor_release(nan);
  tm_tensor_release(any);
  tm_grad_mode_set(mode);
  return value != 0;
}

/* Hands dx on along the edges. */
static int deliver(tm_engine *e, tm_vjp *v, tm_node *n, tm_tensor **dx) {
  for (int i = 0; i < n->nin; i++) {
    if (!n->edge[i].node) continue;
    int k = entry_of(e, n->edge[i].node, 0, NULL), code = TM_OK;
    entry *to = &e->entry[k];
    if (dx && dx[i] && to->wanted) {
      tm_tensor *g = fit(v, dx[i], &n->xm[i], i);
      if (!g) return tm_last_code();
      if (tm_anomaly_mode() && has_nan(g))
        return tm_fail(TM_ERUNTIME, "%s: its gradient for input %d has a NaN%s%s", tm_node_name(n), i + 1, n->where ? "; forward at " : "",
                       n->where ? n->where : "");
      code = add_to(&grads(to)[n->edge[i].out_nr], g, e->create);
    }
    if (code != TM_OK) return code;
    if (--to->deps == 0 && to->wanted && (code = push(e, k)) != TM_OK) return code;
  }
  return TM_OK;
}

/* A gradient arrived, and somebody below wants one. */
static bool has_work(const tm_engine *e, entry *x) {
  bool any = false;
  for (int k = 0; k < x->node->nout && !any; k++) any = grads(x)[k] != NULL;
  for (int i = 0; i < x->node->nin && any; i++) {
    int k = x->node->edge[i].node ? entry_of((tm_engine *)e, x->node->edge[i].node, 0, NULL) : -1;
    if (k >= 0 && e->entry[k].wanted) return true;
  }
  return any && !e->ninput && x->node->kind == NODE_CUSTOM;
}

static int run_node(tm_engine *e, entry *x) {
  tm_node *n = x->node;
  enum { INLINE = 24 };
  tm_tensor *room_inline[INLINE], **room = room_inline;
  uint8_t want_inline[INLINE], *want = want_inline;
  tm_vjp v = {.temp = NULL};
  int code = TM_OK, total = 2 * n->nin + 2 * TM_MAX(n->nout, TM_MAXOUT);
  if (!has_work(e, x)) return deliver(e, &v, n, NULL);
  if (n->freed) return freed_error(n);
  if (total > INLINE) {
    room = tm_host_alloc((size_t)total * sizeof *room);
    want = tm_host_alloc((size_t)n->nin + 1);
    if (!room || !want) code = TM_EMEM;
  }
  if (code == TM_OK) {
    for (int i = 0; i < n->nin; i++) {
      int k = n->edge[i].node ? entry_of(e, n->edge[i].node, 0, NULL) : -1;
      want[i] = k >= 0 && e->entry[k].wanted;
    }
    v.want = want;
    code = n->kind == NODE_WINDOW ? apply_window(&v, n, grads(x), room, want) : apply_op(&v, n, grads(x), room);
    if (code != TM_OK && code != TM_EINTERRUPT && n->where) tm_fail(code, "%.1500s (forward at %.300s)", tm_last_error(), n->where);
  }
  if (code == TM_OK && !e->retain) {
    tm_node *from = n->kind == NODE_WINDOW ? n->inner : n;
    bool kept = false;
    for (int i = 0; i < from->nsaved; i++) kept = kept || from->saved[i].t;
    n->freed = kept;
  }
  if (code == TM_OK) code = deliver(e, &v, n, v.dx);
  if (code == TM_OK && !e->retain) tm_node_drop_saved(n->kind == NODE_WINDOW ? n->inner : n);
  for (int i = 0; i < v.ntemp; i++) tm_tensor_release(v.temp[i]);
  tm_host_free(v.temp);
  if (room != room_inline) tm_host_free(room);
  if (want != want_inline) tm_host_free(want);
  return code;
}

/* A swap gave the leaf another content: the gradient is not for that one. */
static int check_leaf(const tm_node *n) {
  if (n->impl_id == n->leaf->c.impl_id) return TM_OK;
  return tm_fail(TM_ERUNTIME,
                 "backward: the content of a leaf, %s, was swapped between forward and backward; convert before forward or after backward",
                 tm_say(n->leaf));
}

/* Adds the gradient of this pass to the leaf. One that nobody else holds is taken, not copied. */
static int accumulate(tm_engine *e, entry *x) {
  tm_node *n = x->node;
  tm_tensor *leaf = n->leaf, *g = x->one;
  if (check_leaf(n) != TM_OK) return tm_last_code();
  if (g->c.device != leaf->c.device)
    return tm_fail(TM_ERUNTIME, "backward: the gradient is %s, its leaf is %s: it was moved between forward and backward", tm_say(g),
                   tm_say(leaf));
  if (g->c.ndim != leaf->c.ndim || memcmp(g->c.size, leaf->c.size, (size_t)leaf->c.ndim * sizeof(int64_t)))
    return tm_fail(TM_ERUNTIME, "backward: the gradient is %s, its leaf is now %s", tm_say(g), tm_say(leaf));
  if (g->c.dtype != leaf->c.dtype) { /* the leaf was converted meanwhile */
    g = tm_op_run(TM_OPC_cast, 1, &x->one, (double[]){leaf->c.dtype, -1}, NULL);
    if (!g) return tm_last_code();
    tm_tensor_release(x->one);
    x->one = g;
  }
  if (leaf->c.grad) {
    tm_tensor *old = leaf->c.grad, *in[2] = {old, g};
    tm_call c = {.op = &tm_ops[TM_OPC_add], .nin = 2, .in = in, .na = 1, .a = {1}, .inplace = !e->create};
    int code = tm_call_run(&c);
    if (code != TM_OK) return code;
    leaf->c.grad = c.out[0];
    tm_tensor_release(old);
    return TM_OK;
  }
  bool whole = (size_t)g->c.numel * (size_t)tm_dtype_size(g->c.dtype) == g->c.storage->bytes || TM_KIND(g->c.device) == TM_META;
  bool take = g->refs == 1 && g->c.storage->refs == 1 && whole && tm_is_contiguous(g) && (e->create || !g->c.fn);
  if (take) {
    tm_tensor_retain(g);
    leaf->c.grad = g;
    return TM_OK;
  }
  leaf->c.grad = tm_op_run(TM_OPC_clone, 1, &g, (double[]){1}, NULL);
  return leaf->c.grad ? TM_OK : tm_last_code();
}

static void capture(tm_engine *e, entry *x) {
  for (int i = 0; i < e->ninput; i++) {
    if (e->input[i].node != x->node) continue;
    tm_tensor *g = grads(x)[e->input[i].out_nr];
    if (!g) continue;
    tm_tensor_retain(g);
    tm_tensor_release(e->result[i]);
    e->result[i] = g;
  }
}

static void done_with(entry *x) {
  for (int k = 0; k < x->node->nout; k++) {
    tm_tensor_release(grads(x)[k]);
    grads(x)[k] = NULL;
  }
}

/* Custom node: gradients and saved values are laid out for Lua. */
static int ask_custom(tm_engine *e, entry *x, tm_event *event) {
  tm_node *n = x->node;
  tm_vjp v = {.node = n};
  free_custom(e);
  if (n->freed) return freed_error(n);
  e->csaved = tm_host_alloc((size_t)(n->nsaved + 1) * sizeof *e->csaved);
  e->cresult = tm_host_alloc((size_t)(n->nin + 1) * sizeof *e->cresult);
  if (!e->csaved || !e->cresult) return TM_EMEM;
  memset(e->csaved, 0, (size_t)(n->nsaved + 1) * sizeof *e->csaved);
  memset(e->cresult, 0, (size_t)(n->nin + 1) * sizeof *e->cresult);
  e->ncsaved = n->nsaved, e->ncresult = n->nin;
  for (int i = 0; i < n->nsaved; i++) {
    if (!n->saved[i].t) continue;
    tm_tensor *t = unpack(&v, &n->saved[i]);
    if (t) tm_tensor_retain(t);
    e->csaved[i] = t;
    for (; v.ntemp > 0; v.ntemp--) tm_tensor_release(v.temp[v.ntemp - 1]);
    if (!t) break;
  }
  tm_host_free(v.temp);
  for (int i = 0; i < n->nsaved; i++)
    if (n->saved[i].t && !e->csaved[i]) return tm_last_code();
  *event = (tm_event){.kind = TM_EVENT_CUSTOM,
                      .n = n->nout,
                      .nin = n->nin,
                      .create_graph = e->create,
                      .id = n->id,
                      .grad = grads(x),
                      .saved = e->csaved,
                      .nsaved = n->nsaved};
  return TM_OK;
}

static int finish_custom(tm_engine *e, entry *x) {
  tm_node *n = x->node;
  tm_vjp v = {.node = n};
  int code = deliver(e, &v, n, e->cresult);
  if (code == TM_OK && !e->retain) n->freed = n->nsaved > 0, tm_node_drop_saved(n);
  for (int i = 0; i < v.ntemp; i++) tm_tensor_release(v.temp[i]);
  tm_host_free(v.temp);
  free_custom(e);
  return code;
}

static hook *hooks_of(const tm_node *n) {
  if (n->kind != NODE_ACC) return n->hooks;
  return n->leaf->c.hooks ? n->leaf->c.hooks->first : NULL;
}

/* One step of the current node. Returns 1 when `event` asks something of Lua, 0 to go on, -1 on failure. */
static int step(tm_engine *e, tm_event *event) {
  entry *x = &e->entry[e->current];
  tm_node *n = x->node;
  bool acc = n->kind == NODE_ACC;
  switch (e->phase) {
  case PHASE_PICK:
    e->current = pop(e);
    x = &e->entry[e->current], n = x->node;
    if (n->kind == NODE_ACC && e->accumulate && x->one && check_leaf(n) != TM_OK) return -1; /* before its hooks run */
    e->hook = hooks_of(n);
    e->phase = PHASE_HOOKS;
    return 0;
  case PHASE_HOOKS:
    for (; e->hook; e->hook = e->hook->next) {
      hook *h = e->hook;
      if (h->id == 0 || h->kind != TM_HOOK_GRAD || h->out_nr >= n->nout || !grads(x)[h->out_nr]) continue;
      e->hook_out = h->out_nr;
      e->hook_id = h->id;
      e->event_grad[0] = grads(x)[h->out_nr];
      *event = (tm_event){.kind = TM_EVENT_HOOK, .n = 1, .nin = 1, .create_graph = e->create, .id = h->id, .grad = e->event_grad};
      return 1;
    }
    for (hook *h = acc ? NULL : n->hooks; h; h = h->next)
      if (h->id == 0 && h->keep && grads(x)[h->out_nr] && tm_tensor_grad_set(h->keep, grads(x)[h->out_nr]) != TM_OK) return -1;
    if (e->ninput && !e->accumulate) capture(e, x);
    e->phase = PHASE_RUN;
    return 0;
  case PHASE_RUN:
    if (n->kind == NODE_CUSTOM && has_work(e, x)) {
      if (ask_custom(e, x, event) != TM_OK) return -1;
      e->phase = PHASE_CUSTOM;
      return 1;
    }
    if (acc) {
      if (e->accumulate && x->one) {
        if (accumulate(e, x) != TM_OK) return -1;
        e->hook = hooks_of(n);
        e->phase = PHASE_POST;
        return 0;
      }
    } else if (run_node(e, x) != TM_OK) {
      return -1;
    }
    done_with(&e->entry[e->current]);
    e->phase = PHASE_PICK;
    return 0;
  case PHASE_CUSTOM:
    if (finish_custom(e, x) != TM_OK) return -1;
    done_with(&e->entry[e->current]);
    e->phase = PHASE_PICK;
    return 0;
  case PHASE_POST:
    for (; e->hook; e->hook = e->hook->next) {
      if (e->hook->kind != TM_HOOK_POST_ACCUMULATE) continue;
      e->hook_id = e->hook->id;
      e->event_grad[0] = n->leaf;
      *event = (tm_event){.kind = TM_EVENT_POST_ACCUMULATE, .n = 1, .create_graph = e->create, .id = e->hook->id, .grad = e->event_grad};
      return 1;
    }
    done_with(x);
    e->phase = PHASE_PICK;
    return 0;
  }
  return -1;
}

void tm_engine_run(tm_engine *e, tm_event *event) {
  int old = tm_grad_mode_set(e->create);
  event->kind = TM_EVENT_DONE;
  while (e->phase != PHASE_PICK || e->nheap > 0) {
    int r = tm_poll() != TM_OK ? -1 : step(e, event);
    if (r == 0) continue;
    if (r < 0) event->kind = TM_EVENT_ERROR;
    break;
  }
  tm_grad_mode_set(old);
}

/* A hook may have removed itself, or others: find the one after it by id, which grows along the list. */
static hook *hook_after(tm_engine *e) {
  tm_node *n = e->entry[e->current].node;
  hook *h = hooks_of(n);
  while (h && (h->id == 0 || h->id <= e->hook_id)) h = h->next;
  return h;
}

int tm_engine_answer(tm_engine *e, int n, tm_tensor *const *result) {
  entry *x = &e->entry[e->current];
  char text[160];
  if (e->phase == PHASE_HOOKS) {
    tm_tensor *g = n > 0 ? result[0] : NULL, **slot = &grads(x)[e->hook_out];
    e->hook = hook_after(e);
    if (!g || g == *slot) return TM_OK;
    const tm_content *was = &(*slot)->c; /* not what the node was made for: set_data may have reshaped the leaf since */
    if (g->c.ndim != was->ndim || memcmp(g->c.size, was->size, (size_t)was->ndim * sizeof(int64_t)))
      return tm_fail(TM_ERUNTIME, "hook: returned %s, expected shape %s as the gradient has", tm_say(g),
                     tm_shape_text(text, sizeof text, was->ndim, was->size));
    if (g->c.dtype != was->dtype)
      return tm_fail(TM_ERUNTIME, "hook: returned %s, expected dtype %s as the gradient has", tm_say(g), tm_dtype_name(was->dtype));
    if (g->c.device != was->device)
      return tm_fail(TM_ERUNTIME, "hook: returned %s, expected device %s as the gradient has", tm_say(g), tm_device_name(was->device));
    tm_tensor_retain(g);
    tm_tensor_release(*slot);
    *slot = g;
    return TM_OK;
  }
  if (e->phase == PHASE_POST) {
    e->hook = hook_after(e);
    return TM_OK;
  }
  if (e->phase != PHASE_CUSTOM) return tm_fail(TM_ERUNTIME, "engine: nothing was asked");
  if (n != x->node->nin)
    return tm_fail(TM_ERUNTIME, "%s: backward returned %d gradients, expected %d, one for each input", tm_node_name(x->node), n,
                   x->node->nin);
  for (int i = 0; i < n; i++) {
    if (!result[i]) continue;
    tm_tensor_retain(result[i]);
    e->cresult[i] = result[i];
  }
  return TM_OK;
}

/* -- what Lua keeps, seen from its tensors ------------------------------------------------------------------------ */

/* The i-th node that a node keeps alive, or NULL; there are at most `below_count`. */
static int below_count(const tm_node *n) { return n->nin + n->nsaved + 3; }
static tm_node *below(const tm_node *n, int i) {
  if (i < n->nin) return n->edge[i].node;
  i -= n->nin;
  if (i < n->nsaved) return n->saved[i].t ? n->saved[i].t->c.fn : NULL;
  i -= n->nsaved;
  if (i == 0) return n->inner;
  if (i == 1) return n->leaf && n->leaf->c.grad ? n->leaf->c.grad->c.fn : NULL;
  return n->leaf && n->leaf->c.vb ? n->leaf->c.vb->fn : NULL;
}

static int add_pair(int64_t **pair, int64_t *n, int64_t *room, int64_t a, int64_t b) {
  if (*n == *room) {
    int64_t cap = TM_MAX(64, *room * 2), *more = tm_host_realloc(*pair, (size_t)cap * 2 * sizeof *more);
    if (!more) return TM_EMEM;
    *pair = more, *room = cap;
  }
  (*pair)[2 * *n] = a, (*pair)[2 * *n + 1] = b;
  ++*n;
  return TM_OK;
}
static int add_edge(tm_links *l, int64_t from, int64_t to) { return add_pair(&l->edge, &l->nedge, &l->room[1], from, to); }

/* A node on the way down, and what is to be looked at next. */
typedef struct place {
  int entry, next;
} place;

/* In an entry, `deps` is the vertex that stands for the node (0: none so far), `wanted` tells that it stands for no
** other, `queued` that the node is finished. */
static int own_vertex(tm_links *l, entry *x) {
  if (x->wanted) return TM_OK;
  int old = x->deps;
  x->deps = (int)++l->nvertex;
  x->wanted = 1;
  return old ? add_edge(l, x->deps, old) : TM_OK;
}

/* Descends from `top` without recursion. A node that leads to one vertex alone needs none of its own. */
static int descend(tm_engine *e, tm_links *l, tm_node *top) {
  place *stack = NULL;
  int n = 0, cap = 0, added = 0, code = TM_OK;
  tm_node *node = top;
  for (;;) {
    int k = node ? entry_of(e, node, 1, &added) : -1;
    if (node && k < 0) goto nomem;
    if (node && added) {
      if (n == cap) {
        place *more = tm_host_realloc(stack, (size_t)(cap = TM_MAX(64, cap * 2)) * sizeof *more);
        if (!more) goto nomem;
        stack = more;
      }
      stack[n++] = (place){k, 0};
      bool marked = node->kind == NODE_CUSTOM;
      for (hook *h = node->hooks; h && !marked; h = h->next) marked = h->id != 0;
      if (marked) {
        if ((code = own_vertex(l, &e->entry[k])) != TM_OK) goto done;
        int v = e->entry[k].deps;
        if (node->kind == NODE_CUSTOM && (code = add_pair(&l->id, &l->nid, &l->room[2], v, node->id)) != TM_OK) goto done;
        for (hook *h = node->hooks; h; h = h->next)
          if (h->id && (code = add_pair(&l->id, &l->nid, &l->room[2], v, h->id)) != TM_OK) goto done;
      }
    } else if (node && n > 0) { /* met before: its vertex is one that the node above leads to */
      entry *x = &e->entry[k], *up = &e->entry[stack[n - 1].entry];
      if (!x->queued && (code = own_vertex(l, x)) != TM_OK) goto done; /* a way back up: it may lead to more yet */
      if (!up->deps) up->deps = x->deps;
      else if (x->deps && x->deps != up->deps && ((code = own_vertex(l, up)) != TM_OK || (code = add_edge(l, up->deps, x->deps)) != TM_OK))
        goto done;
    }
    node = NULL, added = 0;
    while (n > 0 && !node) {
      place *p = &stack[n - 1];
      tm_node *here = e->entry[p->entry].node;
      if (p->next < below_count(here)) {
        node = below(here, p->next++);
      } else { /* finished: it is met again by the one above, which takes its vertex */
        e->entry[p->entry].queued = 1;
        if (--n > 0) node = here;
      }
    }
    if (!node) goto done;
  }
nomem:
  code = TM_EMEM;
done:
  tm_host_free(stack);
  return code;
}

int tm_links_find(int64_t n, tm_tensor *const *t, tm_links *l) {
  memset(l, 0, sizeof *l);
  if (tm_shared) return tm_fail(TM_ENOTIMPL, "links: tensors of other states may lead to what this one keeps");
  tm_engine *e = tm_host_alloc(sizeof *e);
  if (!e) return TM_EMEM;
  memset(e, 0, sizeof *e);
  int code = TM_OK;
  for (int64_t i = 0; i < n && code == TM_OK; i++) {
    if (!t[i]) continue;
    const tm_content *c = &t[i]->c;
    tm_node *from[] = {c->fn, c->vb ? c->vb->fn : NULL, c->grad ? c->grad->c.fn : NULL};
    for (int k = 0; k < 3 && code == TM_OK; k++) {
      if (!from[k] || (code = descend(e, l, from[k])) != TM_OK) continue;
      int at = entry_of(e, from[k], 0, NULL);
      if (e->entry[at].deps) code = add_pair(&l->root, &l->nroot, &l->room[0], i, e->entry[at].deps);
    }
  }
  tm_engine_free(e);
  return code;
}

void tm_links_free(tm_links *l) {
  tm_host_free(l->root);
  tm_host_free(l->edge);
  tm_host_free(l->id);
  memset(l, 0, sizeof *l);
}
