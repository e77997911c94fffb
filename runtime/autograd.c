/* autograd.c: the graph that a backward pass will walk (engine.c does).
**
** A node keeps edges to the nodes of its inputs, the shapes of inputs and results, and aliases of the values
** that its gradient reads, with the version they had. It keeps content, never a user's handle; only the
** accumulator of a leaf holds the leaf. Nothing here recurses over the graph: a million nodes deep is fine. */
#include <pthread.h>

#include "graph.h"

/* Read at every operator: a fixed place in the thread's block, instead of a call to find it. */
#define HOT_TLS __attribute__((tls_model("initial-exec")))
static _Thread_local int grad_mode HOT_TLS = 1, inference HOT_TLS, anomaly HOT_TLS;

int tm_grad_mode(void) { return grad_mode; }
int tm_grad_mode_set(int on) {
  int old = grad_mode;
  grad_mode = on != 0;
  return old;
}
int tm_inference_mode(void) { return inference; }
int tm_inference_mode_set(int on) {
  int old = inference;
  inference = on != 0;
  return old;
}
int tm_anomaly_mode(void) { return anomaly; }
void tm_anomaly_mode_set(int on) { anomaly = on != 0; }

/* -- nodes ------------------------------------------------------------------------------------------------- */

static int64_t live_nodes, sequence, hook_ids;
int64_t tm_live_nodes(void) { return live_nodes; }

static pthread_mutex_t dead_mutex = PTHREAD_MUTEX_INITIALIZER;
static int64_t *dead;
static int ndead, capdead;

static void bury(int64_t id) { /* ids that do not fit are lost: Lua keeps a function too long, nothing worse */
  if (!id) return;
  pthread_mutex_lock(&dead_mutex);
  if (ndead == capdead) {
    int64_t *more = realloc(dead, (size_t)TM_MAX(64, capdead * 2) * sizeof *dead);
    if (more) dead = more, capdead = TM_MAX(64, capdead * 2);
  }
  if (ndead < capdead) dead[ndead++] = id;
  pthread_mutex_unlock(&dead_mutex);
}

int64_t tm_id_new(void) { return tm_tally(&hook_ids, 1); }
void tm_id_bury(void *id) { bury((int64_t)(intptr_t)id); }

int tm_dead_ids(int64_t *ids, int max) {
  if (ndead == 0) return 0;
  pthread_mutex_lock(&dead_mutex);
  int n = TM_MIN(max, ndead);
  memcpy(ids, dead + ndead - n, (size_t)n * sizeof *ids);
  ndead -= n;
  pthread_mutex_unlock(&dead_mutex);
  return n;
}

const char *tm_node_name(const tm_node *n) {
  switch (n->kind) {
  case NODE_ACC: return "accumulate_grad";
  case NODE_CUSTOM: return n->name;
  case NODE_WINDOW: return tm_node_name(n->inner);
  default: return n->op->name;
  }
}

/* One block: the node and its arrays. A window node has its window, others end before it. */
static tm_node *node_new(int kind, int nin, int nout, int nsaved, int na, bool layout) {
  size_t head = kind == NODE_WINDOW ? sizeof(tm_node) : offsetof(tm_node, window);
  size_t bytes = head + (size_t)nin * (sizeof(tm_edge) + sizeof(tm_inmeta)) + (size_t)nout * sizeof(tm_inmeta) +
                 (size_t)nsaved * sizeof(saved) + (size_t)na * (sizeof(double) + sizeof(void *)) + layout * sizeof(tm_layout);
  tm_node *n = tm_pool_alloc(bytes);
  if (!n) return NULL;
  memset(n, 0, offsetof(tm_node, window));
  char *p = (char *)n + head;
  n->refs = 1;
  n->kind = (int8_t)kind;
  n->bytes = bytes;
  n->nin = nin, n->nout = nout, n->nsaved = nsaved;
  n->edge = (tm_edge *)p, p += (size_t)nin * sizeof(tm_edge);
  n->xm = (tm_inmeta *)p, p += (size_t)nin * sizeof(tm_inmeta);
  n->ym = (tm_inmeta *)p, p += (size_t)nout * sizeof(tm_inmeta);
  n->saved = (saved *)p, p += (size_t)nsaved * sizeof(saved);
  n->a = (double *)p, p += (size_t)na * sizeof(double);
  n->list = (int64_t **)p, p += (size_t)na * sizeof(void *);
  n->layout = layout ? (tm_layout *)p : NULL;
  memset(n->edge, 0, (size_t)nin * sizeof(tm_edge));
  memset(n->saved, 0, (size_t)nsaved * sizeof(saved));
  if (na) n->list[na - 1] = NULL;
  n->seq = tm_tally(&sequence, 1);
  tm_tally(&live_nodes, 1);
  return n;
}

/* To be called once the edges are there: bringing the history of an input up to date may have made a node. */
static void put_last(tm_node *n) { n->seq = tm_tally(&sequence, 1); }

void tm_node_retain(tm_node *n) { tm_count_up(&n->refs); }

/* A leaf names its accumulator without holding it: another thread may just be giving up the last reference. The mutex
** keeps the memory until the leaf has forgotten the name; a count of 0 tells that the node is beyond use. */
static pthread_mutex_t acc_mutex = PTHREAD_MUTEX_INITIALIZER;

static bool node_revive(tm_node *n) {
  int refs = __atomic_load_n(&n->refs, __ATOMIC_RELAXED);
  while (refs > 0)
    if (__atomic_compare_exchange_n(&n->refs, &refs, refs + 1, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return true;
  return false;
}

static void forget_accumulator(tm_node *n) {
  if (TM_UNLIKELY(tm_shared)) pthread_mutex_lock(&acc_mutex);
  if (n->leaf->c.acc == n) n->leaf->c.acc = NULL;
  if (TM_UNLIKELY(tm_shared)) pthread_mutex_unlock(&acc_mutex);
}

void tm_node_drop_saved(tm_node *n) {
  for (int i = 0; i < n->nsaved; i++) {
    tm_tensor *t = n->saved[i].t;
    n->saved[i].t = NULL;
    tm_tensor_release(t);
  }
}

static void drop_hooks(hook *h) {
  while (h) {
    hook *next = h->next;
    bury(h->id);
    tm_host_free(h);
    h = next;
  }
}

/* Freeing a node releases its inputs' nodes, which go on a list instead of the stack. */
static _Thread_local tm_node *doomed HOT_TLS;
static _Thread_local bool draining HOT_TLS;

static void node_free(tm_node *n) {
  for (int i = 0; i < n->nin; i++) tm_node_release(n->edge[i].node);
  tm_node_drop_saved(n);
  drop_hooks(n->hooks);
  tm_node_release(n->inner);
  if (n->leaf) {
    forget_accumulator(n);
    tm_tensor_release(n->leaf);
  }
  if (n->kind == NODE_CUSTOM) bury(n->id);
  if (n->kind == NODE_OP) tm_host_free(n->list[n->op->na]); /* the numbers of all lists */
  tm_host_free(n->name);
  tm_host_free(n->where);
  tm_tally(&live_nodes, -1);
  tm_pool_free(n, n->bytes);
}

void tm_node_release(tm_node *n) {
  if (!n || tm_count_down(&n->refs) > 0) return;
  n->next = doomed;
  doomed = n;
  if (draining) return;
  draining = true;
  while (doomed) {
    tm_node *first = doomed;
    doomed = first->next;
    node_free(first);
  }
  draining = false;
}

static void meta_of(tm_inmeta *m, const tm_tensor *t) {
  m->ndim = t->c.ndim, m->dtype = t->c.dtype, m->device = t->c.device;
  for (int i = 0; i < t->c.ndim; i++) m->size[i] = t->c.size[i];
}

static void layout_of(tm_layout *l, const tm_tensor *t) {
  for (int i = 0; i < t->c.ndim; i++) l->stride[i] = t->c.stride[i];
  l->offset = t->c.offset;
}

/* -- views and history --------------------------------------------------------------------------------------- */

void tm_viewbase_release(tm_viewbase *vb) {
  if (!vb || tm_count_down(&vb->refs) > 0) return;
  tm_node_release(vb->fn);
  tm_host_free(vb);
}

static tm_viewbase *viewbase_new(tm_tensor *base) {
  tm_viewbase *vb = tm_host_alloc(sizeof *vb);
  if (!vb) return NULL;
  *vb = (tm_viewbase){.refs = 1, .fn = base->c.fn, .out_nr = base->c.out_nr, .ndim = base->c.ndim, .offset = base->c.offset};
  if (vb->fn) tm_node_retain(vb->fn);
  else vb->leaf = base;
  memcpy(vb->size, base->c.size, sizeof vb->size);
  memcpy(vb->stride, base->c.stride, sizeof vb->stride);
  return vb;
}

static tm_node *accumulator(tm_tensor *leaf);

/* The edge of the base: its node, or the accumulator of a base that is a leaf. */
static int base_edge(tm_viewbase *vb, tm_edge *e) {
  *e = (tm_edge){NULL, 0};
  if (vb->fn) {
    tm_node_retain(vb->fn);
    *e = (tm_edge){vb->fn, vb->out_nr};
  } else if (vb->leaf && vb->leaf->c.flags & TM_FLAG_REQUIRES_GRAD) {
    if (!(e->node = accumulator(vb->leaf))) return TM_EMEM;
  }
  return TM_OK;
}

/* The retained gradient is that of the tensor's latest value: it goes to the new node (NULL: nowhere). */
static void move_retained(tm_tensor *t, tm_node *n, int k) {
  if (!(t->c.flags & TM_FLAG_RETAINS_GRAD) || !t->c.fn) return;
  hook **h = &t->c.fn->hooks;
  while (*h && (*h)->keep != t) h = &(*h)->next;
  hook *moved = *h;
  if (!moved) return;
  *h = moved->next;
  if (!n) {
    tm_host_free(moved);
    t->c.flags &= (uint8_t)~TM_FLAG_RETAINS_GRAD;
    return;
  }
  moved->out_nr = k;
  moved->next = n->hooks;
  n->hooks = moved;
}

/* After an in-place change through the base or another view, the history of `t` is out of date: a base takes
** the new node, a view becomes as_strided of it. */
static int refresh(tm_tensor *t) {
  tm_viewbase *vb = t->c.vb;
  if (TM_LIKELY(!vb || t->c.view_epoch == vb->epoch)) return TM_OK;
  tm_node *fn = NULL;
  int32_t out_nr = 0;
  if (!(t->c.flags & TM_FLAG_VIEW)) {
    fn = vb->fn, out_nr = vb->out_nr;
    if (fn) tm_node_retain(fn);
  } else if (!(t->c.flags & TM_FLAG_NOGRAD_VIEW)) {
    tm_edge e;
    if (base_edge(vb, &e) != TM_OK) return TM_EMEM;
    if (e.node) {
      const tm_op *op = &tm_ops[TM_OPC_as_strided];
      int64_t *numbers = tm_host_alloc(2 * TM_MAXDIM * sizeof *numbers);
      fn = numbers ? node_new(NODE_OP, 1, 1, 0, op->na + 1, true) : NULL;
      if (!fn) {
        tm_host_free(numbers);
        tm_node_release(e.node);
        return TM_EMEM;
      }
      fn->op = op;
      fn->edge[0] = e;
      fn->xm[0] = (tm_inmeta){.ndim = (int8_t)vb->ndim, .dtype = t->c.dtype, .device = t->c.device};
      memcpy(fn->xm[0].size, vb->size, sizeof vb->size);
      memcpy(fn->layout->stride, vb->stride, sizeof vb->stride);
      fn->layout->offset = vb->offset;
      meta_of(&fn->ym[0], t);
      memcpy(numbers, t->c.size, sizeof t->c.size);
      memcpy(numbers + TM_MAXDIM, t->c.stride, sizeof t->c.stride);
      fn->a[0] = fn->a[1] = t->c.ndim;
      fn->a[2] = (double)t->c.offset;
      fn->list[0] = numbers, fn->list[1] = numbers + TM_MAXDIM, fn->list[2] = NULL;
      fn->list[op->na] = numbers;
    }
  }
  move_retained(t, fn, out_nr);
  tm_node_release(t->c.fn);
  t->c.fn = fn, t->c.out_nr = out_nr;
  t->c.view_epoch = vb->epoch;
  return TM_OK;
}

int tm_tensor_requires_grad(const tm_tensor *t) {
  tm_tensor *m = (tm_tensor *)t;                /* refreshing the history does not change what the tensor is */
  if (m->c.vb && refresh(m) != TM_OK) return 1; /* only a history takes memory; tm_edge_of fails, or tries again */
  return m->c.fn || m->c.flags & TM_FLAG_REQUIRES_GRAD;
}
int tm_tensor_is_leaf(const tm_tensor *t) {
  tm_tensor_requires_grad(t);
  return !t->c.fn;
}
int tm_tensor_is_inference(const tm_tensor *t) { return (t->c.flags & TM_FLAG_INFERENCE) != 0; }

/* The node that adds gradients to a leaf; new reference. */
static tm_node *accumulator(tm_tensor *leaf) {
  if (TM_UNLIKELY(tm_shared)) pthread_mutex_lock(&acc_mutex);
  tm_node *n = leaf->c.acc;
  if ((!n || !node_revive(n)) && (n = node_new(NODE_ACC, 0, 1, 0, 0, false))) {
    n->leaf = leaf;
    tm_tensor_retain(leaf);
    n->impl_id = leaf->c.impl_id;
    meta_of(&n->ym[0], leaf);
    n->seq = INT64_MAX; /* leaves first: a gradient is freed as soon as it has been added */
    leaf->c.acc = n;
  }
  if (TM_UNLIKELY(tm_shared)) pthread_mutex_unlock(&acc_mutex);
  return n;
}

/* Where gradients of `t` go; node NULL if nowhere. New reference. */
int tm_edge_of(tm_tensor *t, tm_edge *e) {
  *e = (tm_edge){NULL, 0};
  if (!t || !tm_tensor_requires_grad(t)) return TM_OK;
  if (refresh(t) != TM_OK) return TM_EMEM;
  if (t->c.fn) {
    tm_node_retain(t->c.fn);
    *e = (tm_edge){t->c.fn, t->c.out_nr};
    return TM_OK;
  }
  e->node = accumulator(t);
  return e->node ? TM_OK : TM_EMEM;
}

void tm_autograd_drop(tm_tensor *t) {
  tm_content *c = &t->c;
  if (c->flags & TM_FLAG_RETAINS_GRAD && c->fn)
    for (hook *h = c->fn->hooks; h; h = h->next)
      if (h->keep == t) h->keep = NULL;
  if (c->vb && c->vb->leaf == t) c->vb->leaf = NULL;
  tm_viewbase_release(c->vb);
  tm_node_release(c->fn);
  tm_tensor_release(c->grad);
  if (c->hooks) {
    drop_hooks(c->hooks->first);
    tm_host_free(c->hooks);
  }
  c->vb = NULL, c->fn = NULL, c->grad = NULL, c->hooks = NULL, c->acc = NULL;
}

/* -- recording ---------------------------------------------------------------------------------------------------- */

int tm_wants_record(const tm_call *c) {
  if (!grad_mode) return 0;
  for (int i = 0; i < c->nin; i++)
    if (c->in[i] && tm_tensor_requires_grad(c->in[i])) return 1;
  return 0;
}

/* An alias of an input that leads back into the graph, so that gradients of gradients find the way. */
static int save_input(tm_node *n, int i, tm_tensor *t, int64_t version) {
  if (t->c.flags & TM_FLAG_INFERENCE)
    return tm_fail(TM_ERUNTIME, "%s: %s was made in inference mode and cannot be saved for backward; clone it outside", n->op->name,
                   tm_say(t));
  tm_tensor *s = tm_tensor_alias(t);
  if (!s) return TM_EMEM;
  if (n->edge[i].node) {
    tm_node_retain(n->edge[i].node);
    s->c.fn = n->edge[i].node, s->c.out_nr = n->edge[i].out_nr;
  }
  n->saved[i] = (saved){s, version, -1};
  return TM_OK;
}

static int copy_lists(tm_node *n, const tm_call *c) {
  int total = 0, na = n->op->na;
  for (int k = 0; k < na; k++) {
    int t = n->op->atype[k];
    bool list = t == TM_ARG_DIMS || t == TM_ARG_SHAPE || t == TM_ARG_INTS;
    n->a[k] = c->a[k];
    n->list[k] = NULL;
    if (list && c->a[k] > 0 && c->list[k]) total += (int)c->a[k];
  }
  if (!total) return TM_OK;
  int64_t *p = tm_host_alloc((size_t)total * sizeof *p);
  if (!p) return TM_EMEM;
  n->list[na] = p;
  for (int k = 0; k < na; k++) {
    int t = n->op->atype[k];
    if ((t == TM_ARG_DIMS || t == TM_ARG_SHAPE || t == TM_ARG_INTS) && c->a[k] > 0 && c->list[k]) {
      memcpy(p, c->list[k], (size_t)c->a[k] * sizeof *p);
      n->list[k] = p;
      p += (int)c->a[k];
    }
  }
  return TM_OK;
}

static int need_of(const tm_op *op, int i) { return op->need[TM_MIN(i, op->nt)]; } /* a list shares one entry */
static bool needed(int need, const tm_op *op, int i) { return need >> TM_MIN(i, op->nt) & 1; }

int tm_keep_before(tm_call *c) {
  int need = 0;
  for (int i = 0; i < c->nin; i++)
    if (c->in[i] && tm_tensor_requires_grad(c->in[i])) need |= need_of(c->op, i);
  if (!needed(need, c->op, 0)) return TM_OK;
  tm_tensor *x = c->in[0];
  c->before = tm_tensor_empty(x->c.ndim, x->c.size, NULL, x->c.dtype, x->c.device);
  if (!c->before || (TM_KIND(x->c.device) == TM_CPU && tm_tensor_copy_data(c->before, x) != TM_OK)) return tm_last_code();
  return TM_OK;
}

static tm_node *node_of_call(const tm_call *c) {
  const tm_op *op = c->op;
  bool view = op->flags & TM_OP_VIEW;
  tm_node *n = node_new(NODE_OP, c->nin, c->nout, *op->saves ? c->nin + c->nout : 0, op->na + 1, view);
  if (!n) return NULL;
  n->op = op;
  if (view) layout_of(n->layout, c->in[0]);
  int need = 0;
  for (int i = 0; i < c->nin; i++) {
    if (c->in[i]) meta_of(&n->xm[i], c->in[i]);
    else n->xm[i].ndim = -1;
    if (tm_edge_of(c->in[i], &n->edge[i]) != TM_OK) goto fail;
    if (n->edge[i].node) need |= need_of(op, i);
  }
  put_last(n);
  if (copy_lists(n, c) != TM_OK) goto fail;
  for (int i = 0; i < c->nin; i++) {
    if (!c->in[i] || !needed(need, op, i)) continue;
    if (i == 0 && c->before) {
      if (save_input(n, 0, c->before, c->before->c.storage->version) != TM_OK) goto fail;
      continue;
    }
    /* The kernel of an in-place call has changed what shares the target's storage: backward will refuse it. */
    bool changed = c->inplace && c->in[i]->c.storage == c->out[0]->c.storage;
    if (save_input(n, i, c->in[i], c->in[i]->c.storage->version - changed) != TM_OK) goto fail;
  }
  for (int k = 0; k < c->nout; k++) {
    meta_of(&n->ym[k], c->out[k]);
    if (!(need >> (8 + k) & 1)) continue;
    tm_tensor *s = tm_tensor_alias(c->out[k]); /* without fn: it would hold its own node */
    if (!s) goto fail;
    n->saved[c->nin + k] = (saved){s, c->out[k]->c.storage->version, k};
  }
  return n;
fail:
  tm_node_release(n);
  return NULL;
}

/* Gives `t` the history (n, k); takes over one reference to n. */
static void set_history(tm_tensor *t, tm_node *n, int k) {
  move_retained(t, n, k);
  tm_node_release(t->c.fn);
  t->c.fn = n, t->c.out_nr = k;
  t->c.flags &= (uint8_t)~TM_FLAG_REQUIRES_GRAD;
}

/* An in-place operator on a view: the base's new history is its old one with a window replaced. */
static int record_window(tm_tensor *view, tm_node *inner) {
  tm_viewbase *vb = view->c.vb;
  tm_node *n = node_new(NODE_WINDOW, inner->nin, 1, 0, 0, true);
  if (!n) {
    tm_node_release(inner);
    return TM_EMEM;
  }
  n->inner = inner;
  tm_node_release(inner->edge[0].node);
  inner->edge[0].node = NULL;
  memcpy(n->xm, inner->xm, (size_t)inner->nin * sizeof *n->xm);
  for (int i = 1; i < inner->nin; i++) {
    n->edge[i] = inner->edge[i];
    if (n->edge[i].node) tm_node_retain(n->edge[i].node);
  }
  n->xm[0] = (tm_inmeta){.ndim = (int8_t)vb->ndim, .dtype = view->c.dtype, .device = view->c.device};
  memcpy(n->xm[0].size, vb->size, sizeof vb->size);
  memcpy(n->layout->stride, vb->stride, sizeof vb->stride);
  n->layout->offset = vb->offset;
  n->ym[0] = n->xm[0];
  meta_of(&n->window, view);
  layout_of(&n->window_layout, view);
  if (base_edge(vb, &n->edge[0]) != TM_OK) {
    tm_node_release(n);
    return TM_EMEM;
  }
  tm_node_release(vb->fn);
  vb->fn = n, vb->out_nr = 0;
  vb->epoch++;
  return refresh(view);
}

int tm_record(tm_call *c) {
  tm_node *n = node_of_call(c);
  if (!n) return tm_last_code();
  if (c->inplace) {
    tm_tensor *x = c->out[0];
    if (x->c.flags & TM_FLAG_VIEW && x->c.vb) return record_window(x, n);
    set_history(x, n, 0);
    if (x->c.vb) {
      tm_node_retain(n);
      tm_node_release(x->c.vb->fn);
      x->c.vb->fn = n, x->c.vb->out_nr = 0, x->c.vb->leaf = NULL;
      x->c.view_epoch = ++x->c.vb->epoch;
    }
    return TM_OK;
  }
  for (int k = 0; k < c->nout; k++) {
    if (!tm_is_float(c->out[k]->c.dtype)) continue;
    tm_node_retain(n);
    set_history(c->out[k], n, k);
  }
  tm_node_release(n);
  return TM_OK;
}

int tm_record_view(tm_call *c) {
  tm_tensor *x = c->in[0], *y = c->out[0];
  if (inference) y->c.flags |= TM_FLAG_INFERENCE;
  if (grad_mode && tm_tensor_requires_grad(x) && tm_is_float(y->c.dtype)) {
    int code = tm_record(c);
    if (code != TM_OK) return code;
  }
  if (y->c.storage != x->c.storage || inference) return TM_OK; /* reshape copied */
  if (!x->c.vb && !(x->c.vb = viewbase_new(x))) return TM_EMEM;
  tm_count_up(&x->c.vb->refs);
  y->c.vb = x->c.vb;
  y->c.view_epoch = x->c.vb->epoch;
  y->c.flags |= TM_FLAG_VIEW | (x->c.flags & (TM_FLAG_NOGRAD_VIEW | TM_FLAG_CUSTOM_VIEW)) | (grad_mode ? 0 : TM_FLAG_NOGRAD_VIEW);
  return TM_OK;
}

/* The custom node that a tensor, or the base that it is a view of, came from. */
static const char *custom_maker(const tm_tensor *t) {
  const tm_node *n = t->c.fn;
  while (n && n->kind != NODE_CUSTOM && n->nin > 0) n = n->edge[0].node;
  return n && n->kind == NODE_CUSTOM ? n->name : "a function written in Lua";
}

int tm_check_inplace(tm_call *c, int *record) {
  tm_tensor *x = c->in[0];
  const char *name = c->op->name;
  if (x->c.flags & TM_FLAG_INFERENCE && !inference)
    return tm_fail(TM_ERUNTIME, "%s_: %s was made in inference mode and cannot be changed in place outside of it; clone it", name,
                   tm_say(x));
  if (!grad_mode) return TM_OK;
  tm_viewbase *vb = x->c.flags & TM_FLAG_VIEW ? x->c.vb : NULL;
  bool own = tm_tensor_requires_grad(x);
  bool leaf_base = vb && !vb->fn && vb->leaf && vb->leaf->c.flags & TM_FLAG_REQUIRES_GRAD;
  if (x->c.flags & TM_FLAG_REQUIRES_GRAD && !x->c.fn)
    return tm_fail(TM_ERUNTIME, "%s_: a leaf that requires grad, %s, cannot be changed in place; use tm.no_grad", name, tm_say(x));
  if (leaf_base)
    return tm_fail(TM_ERUNTIME, "%s_: a view of a leaf that requires grad, %s, cannot be changed in place; use tm.no_grad", name,
                   tm_say(x));
  *record = tm_wants_record(c);
  if (x->c.flags & TM_FLAG_NOGRAD_VIEW && (*record || (vb && vb->fn)))
    return tm_fail(TM_ERUNTIME, "%s_: %s is a view made under no_grad; it cannot be changed in place where gradients are recorded", name,
                   tm_say(x));
  if (own && x->c.flags & TM_FLAG_CUSTOM_VIEW)
    return tm_fail(TM_ERUNTIME, "%s_: %s shares memory with what went into %s, whose gradient the change would bypass; clone it first",
                   name, tm_say(x), custom_maker(x));
  if (own && !c->op->vjp)
    return tm_fail(TM_ERUNTIME, "%s_: %s requires grad, and %s_ has no gradient; use tm.no_grad or detach", name, tm_say(x), name);
  if (*record && !tm_is_float(x->c.dtype)) *record = 0;
  return TM_OK;
}

/* -- tensors as users see them --------------------------------------------------------------------------------- */

int tm_tensor_requires_grad_set(tm_tensor *t, int on) {
  if (tm_tensor_requires_grad(t) == (on != 0)) return TM_OK;
  if (t->c.fn)
    return tm_fail(TM_ERUNTIME, "requires_grad: only of a leaf; this tensor was made by %s (detach it first)", tm_node_name(t->c.fn));
  if (on && !tm_is_float(t->c.dtype))
    return tm_fail(TM_ERUNTIME, "requires_grad: only floating dtypes can require grad, got %s", tm_say(t));
  if (on && t->c.flags & TM_FLAG_INFERENCE && !inference)
    return tm_fail(TM_ERUNTIME, "requires_grad: %s was made in inference mode; clone it", tm_say(t));
  if (on) t->c.flags |= TM_FLAG_REQUIRES_GRAD;
  else t->c.flags &= (uint8_t)~TM_FLAG_REQUIRES_GRAD;
  return TM_OK;
}

tm_tensor *tm_tensor_grad(const tm_tensor *t) { return t->c.grad; }

int tm_tensor_grad_set(tm_tensor *t, tm_tensor *g) {
  if (g == t) return tm_fail(TM_ERUNTIME, "grad: a tensor cannot be its own gradient");
  if (g && (g->c.dtype != t->c.dtype || g->c.device != t->c.device || g->c.ndim != t->c.ndim ||
            memcmp(g->c.size, t->c.size, (size_t)t->c.ndim * sizeof(int64_t))))
    return tm_fail(TM_ERUNTIME, "grad: %s does not fit a tensor %s", tm_say(g), tm_say(t));
  if (g) tm_tensor_retain(g);
  tm_tensor *old = t->c.grad;
  t->c.grad = g;
  tm_tensor_release(old);
  return TM_OK;
}

int tm_tensor_retain_grad(tm_tensor *t) {
  if (!tm_tensor_requires_grad(t)) return tm_fail(TM_ERUNTIME, "retain_grad: %s does not require grad", tm_say(t));
  if (!t->c.fn || t->c.flags & TM_FLAG_RETAINS_GRAD) return TM_OK;
  hook *h = tm_host_alloc(sizeof *h);
  if (!h) return TM_EMEM;
  *h = (hook){.next = t->c.fn->hooks, .out_nr = t->c.out_nr, .keep = t};
  t->c.fn->hooks = h;
  t->c.flags |= TM_FLAG_RETAINS_GRAD;
  return TM_OK;
}
int tm_tensor_retains_grad(const tm_tensor *t) { return t->c.fn && t->c.flags & TM_FLAG_RETAINS_GRAD; }

tm_tensor *tm_tensor_detach(const tm_tensor *t) { return tm_tensor_alias(t); }

int tm_tensor_detach_(tm_tensor *t) {
  if (t->c.flags & TM_FLAG_VIEW && t->c.vb)
    return tm_fail(TM_ERUNTIME, "detach_: %s is a view, whose history belongs to its base; use detach", tm_say(t));
  if (refresh(t) != TM_OK) return TM_EMEM;
  if (t->c.vb && t->c.fn) { /* its views keep the old history */
    tm_viewbase_release(t->c.vb);
    t->c.vb = NULL;
  }
  if (t->c.flags & TM_FLAG_RETAINS_GRAD && t->c.fn)
    for (hook *h = t->c.fn->hooks; h; h = h->next)
      if (h->keep == t) h->keep = NULL;
  tm_node_release(t->c.fn);
  t->c.fn = NULL;
  t->c.flags &= (uint8_t) ~(TM_FLAG_REQUIRES_GRAD | TM_FLAG_RETAINS_GRAD);
  return TM_OK;
}

const char *tm_tensor_grad_fn(const tm_tensor *t) { return tm_tensor_requires_grad(t) && t->c.fn ? tm_node_name(t->c.fn) : NULL; }
int64_t tm_tensor_node_id(const tm_tensor *t) { return tm_tensor_requires_grad(t) && t->c.fn ? t->c.fn->seq : 0; }

int tm_tensor_annotate(tm_tensor *t, const char *where) {
  if (!t->c.fn || t->c.fn->where) return TM_OK;
  if (!(t->c.fn->where = tm_host_alloc(strlen(where) + 1))) return TM_EMEM;
  strcpy(t->c.fn->where, where);
  return TM_OK;
}

int tm_zero_grad(int n, tm_tensor *const *t, int set_to_none) {
  for (int i = 0; i < n; i++) {
    tm_tensor *g = t[i]->c.grad;
    if (!g) continue;
    if (set_to_none) {
      t[i]->c.grad = NULL;
      tm_tensor_release(g);
      continue;
    }
    if (g->c.fn) tm_tensor_detach_(g);
    g->c.flags &= (uint8_t)~TM_FLAG_REQUIRES_GRAD;
    int mode = tm_grad_mode_set(0);
    tm_call c = {.op = &tm_ops[TM_OPC_fill], .nin = 1, .in = &g, .na = 1, .inplace = 1};
    int code = tm_call_run(&c);
    tm_grad_mode_set(mode);
    if (code != TM_OK) return code;
    tm_tensor_release(g); /* the call's result */
  }
  return TM_OK;
}

/* -- content moves between handles ------------------------------------------------------------------------------- */

static void poison(tm_tensor *t) {
  if (t->c.acc) t->c.acc->impl_id = 0;
  t->c.acc = NULL;
  if (t->c.vb && t->c.vb->leaf == t) t->c.vb->leaf = NULL;
}

/* One walk over a node that made both. */
static void exchange_kept(tm_node *n, tm_tensor *a, tm_tensor *b) {
  for (hook *h = n ? n->hooks : NULL; h; h = h->next)
    if (h->keep == a || h->keep == b) h->keep = h->keep == a ? b : a;
}

void tm_swap_contents(tm_tensor *a, tm_tensor *b) {
  if (a == b) return;
  poison(a);
  poison(b);
  exchange_kept(a->c.fn, a, b);
  if (b->c.fn != a->c.fn) exchange_kept(b->c.fn, a, b);
  tm_content t = a->c;
  a->c = b->c;
  b->c = t;
  a->epoch++, b->epoch++;
}

int tm_tensor_set_data(tm_tensor *t, const tm_tensor *source) {
  if (!tm_compat_type(t, source))
    return tm_fail(TM_ERUNTIME, "set_data: %s cannot take the content of %s: meta and real tensors do not mix", tm_say(t), tm_say(source));
  if (tm_tensor_requires_grad(t) && !tm_is_float(source->c.dtype))
    return tm_fail(TM_ERUNTIME, "set_data: %s requires grad and cannot become %s", tm_say(t), tm_say(source));
  t->epoch++;
  tm_content *c = &t->c;
  const tm_content *s = &source->c;
  int64_t version = c->storage->version;
  if (c->dtype != s->dtype || c->device != s->device) c->acc = NULL; /* an old graph keeps its node */
  if (s->storage != c->storage) {
    tm_storage *old = c->storage;
    c->storage = tm_storage_retain(s->storage);
    if (c->storage->refs <= 2) c->storage->version = TM_MAX(version, c->storage->version);
    tm_storage_release(old);
    c->flags &= (uint8_t)~TM_FLAG_CUSTOM_VIEW;
  }
  c->numel = s->numel, c->offset = s->offset, c->dtype = s->dtype, c->device = s->device, c->ndim = s->ndim;
  memcpy(c->size, s->size, sizeof c->size);
  memcpy(c->stride, s->stride, sizeof c->stride);
  if (c->vb) { /* its views stay on the old storage */
    if (c->vb->leaf == t) c->vb->leaf = NULL;
    tm_viewbase_release(c->vb);
    c->vb = NULL;
    c->flags &= (uint8_t) ~(TM_FLAG_VIEW | TM_FLAG_NOGRAD_VIEW);
  }
  return TM_OK;
}

/* -- hooks ------------------------------------------------------------------------------------------------------------ */

static hook **hook_list(tm_tensor *t) {
  if (t->c.fn) return &t->c.fn->hooks;
  if (!t->c.hooks) {
    if (!(t->c.hooks = tm_host_alloc(sizeof *t->c.hooks))) return NULL;
    t->c.hooks->first = NULL;
  }
  return &t->c.hooks->first;
}

int64_t tm_hook_add(tm_tensor *t, int kind) {
  if (!tm_tensor_requires_grad(t)) return tm_fail(TM_ERUNTIME, "register_hook: %s does not require grad", tm_say(t)), 0;
  if (kind == TM_HOOK_POST_ACCUMULATE && t->c.fn)
    return tm_fail(TM_ERUNTIME, "register_post_accumulate_grad_hook: only for leaves; this tensor was made by %s", tm_node_name(t->c.fn)),
           0;
  hook **at = hook_list(t), *h = at ? tm_host_alloc(sizeof *h) : NULL;
  if (!h) return 0;
  while (*at) at = &(*at)->next;
  *h = (hook){.id = tm_tally(&hook_ids, 1), .kind = kind, .out_nr = t->c.fn ? t->c.out_nr : 0};
  *at = h;
  return h->id;
}

static int hook_cut(hook **at, int64_t id) {
  for (; *at; at = &(*at)->next)
    if ((*at)->id == id) {
      hook *h = *at;
      *at = h->next;
      tm_host_free(h);
      return 1;
    }
  return 0;
}

int tm_hook_remove(tm_tensor *t, int64_t id) {
  if (t->c.fn && hook_cut(&t->c.fn->hooks, id)) return 1;
  return t->c.hooks && hook_cut(&t->c.hooks->first, id);
}

int64_t tm_custom_record(const char *name, int nin, tm_tensor *const *in, int nout, tm_tensor *const *out, int nsave,
                         tm_tensor *const *save) {
  if (!name) return tm_fail(TM_EVALUE, "custom function: no name"), 0;
  tm_node *n = node_new(NODE_CUSTOM, nin, nout, nsave, 0, false);
  if (!n) return 0;
  if (!(n->name = tm_host_alloc(strlen(name) + 1))) goto fail;
  strcpy(n->name, name);
  for (int i = 0; i < nin; i++) {
    if (in[i]) meta_of(&n->xm[i], in[i]);
    else n->xm[i].ndim = -1;
    if (tm_edge_of(in[i], &n->edge[i]) != TM_OK) goto fail;
  }
  put_last(n);
  for (int i = 0; i < nsave; i++) {
    if (!save[i]) continue;
    tm_tensor *s = tm_tensor_alias(save[i]);
    if (!s) goto fail;
    n->saved[i] = (saved){s, save[i]->c.storage->version, -1};
    for (int k = 0; k < nout; k++)
      if (save[i] == out[k]) n->saved[i].result = k;
    if (n->saved[i].result >= 0) continue; /* with its history it would hold its own node */
    tm_edge e;
    if (tm_edge_of(save[i], &e) != TM_OK) goto fail;
    s->c.fn = e.node, s->c.out_nr = e.out_nr;
  }
  for (int k = 0; k < nout; k++) {
    if (!out[k] || !tm_is_float(out[k]->c.dtype)) continue;
    meta_of(&n->ym[k], out[k]);
    tm_node_retain(n);
    set_history(out[k], n, k);
    for (int i = 0; i < nin; i++)
      if (in[i] && in[i] != out[k] && in[i]->c.storage == out[k]->c.storage) out[k]->c.flags |= TM_FLAG_CUSTOM_VIEW;
  }
  n->id = tm_tally(&hook_ids, 1);
  int64_t id = n->id;
  tm_node_release(n); /* without differentiable results it is gone, and Lua will hear that its id is dead */
  return id;
fail:
  tm_node_release(n);
  return 0;
}
