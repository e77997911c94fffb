/* autograd.c: the graph and the engine that walks it backward.
**
** A node keeps edges to the nodes of its inputs, the shapes of inputs and results, and aliases of the values
** that its gradient reads, with the version they had. It keeps content, never a user's handle; only the
** accumulator of a leaf holds the leaf. Nothing here recurses over the graph: a million nodes deep is fine.
** The engine returns to Lua for hooks and custom nodes, and is resumed with the answer. */
#include <pthread.h>

#include "internal.h"

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

typedef struct saved {
  tm_tensor *t;
  int64_t version;
  int result; /* it is that result of the node; -1: no */
} saved;

typedef struct hook {
  struct hook *next;
  int64_t id; /* 0: retain the gradient in `keep` */
  int kind, out_nr;
  tm_tensor *keep; /* weak */
} hook;

struct tm_hooks {
  hook *first;
};

enum node_kind { NODE_OP, NODE_ACC, NODE_CUSTOM, NODE_WINDOW };

struct tm_node {
  int refs;
  int8_t kind;
  uint8_t freed; /* saved values are gone */
  int nin, nout, nsaved;
  size_t bytes; /* of the block */
  union {
    int64_t seq;   /* order of creation: later nodes run first */
    tm_node *next; /* of those about to be freed */
  };
  int64_t id; /* of a custom node: what Lua knows it by */
  const tm_op *op;
  char *name;        /* of a custom node */
  char *where;       /* anomaly mode: file and line of the forward call */
  tm_edge *edge;     /* [nin] */
  tm_inmeta *xm;     /* [nin] */
  tm_inmeta *ym;     /* [nout] results */
  tm_layout *layout; /* views: of input 0; window: of its base */
  saved *saved;      /* op that saves: [nin] inputs (t NULL: not saved), then [nout] results; custom: [nsaved] */
  double *a;         /* op: arguments */
  int64_t **list;
  hook *hooks;
  tm_tensor *leaf;  /* accumulator: retained */
  int64_t impl_id;  /* accumulator: the content that it was made for; 0: that was swapped away */
  tm_node *inner;   /* window: the in-place operator, whose input 0 is the window */
  tm_inmeta window; /* window: the view that was changed; its base is xm[0] */
  tm_layout window_layout;
};

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

static void node_retain(tm_node *n) { tm_count_up(&n->refs); }

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

static void free_saved(tm_node *n) {
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

static void node_release(tm_node *n);

static void node_free(tm_node *n) {
  for (int i = 0; i < n->nin; i++) node_release(n->edge[i].node);
  free_saved(n);
  drop_hooks(n->hooks);
  node_release(n->inner);
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

static void node_release(tm_node *n) {
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
  node_release(vb->fn);
  tm_host_free(vb);
}

static tm_viewbase *viewbase_new(tm_tensor *base) {
  tm_viewbase *vb = tm_host_alloc(sizeof *vb);
  if (!vb) return NULL;
  *vb = (tm_viewbase){.refs = 1, .fn = base->c.fn, .out_nr = base->c.out_nr, .ndim = base->c.ndim, .offset = base->c.offset};
  if (vb->fn) node_retain(vb->fn);
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
    node_retain(vb->fn);
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
    if (fn) node_retain(fn);
  } else if (!(t->c.flags & TM_FLAG_NOGRAD_VIEW)) {
    tm_edge e;
    if (base_edge(vb, &e) != TM_OK) return TM_EMEM;
    if (e.node) {
      const tm_op *op = &tm_ops[TM_OPC_as_strided];
      int64_t *numbers = tm_host_alloc(2 * TM_MAXDIM * sizeof *numbers);
      fn = numbers ? node_new(NODE_OP, 1, 1, 0, op->na + 1, true) : NULL;
      if (!fn) {
        tm_host_free(numbers);
        node_release(e.node);
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
  node_release(t->c.fn);
  t->c.fn = fn, t->c.out_nr = out_nr;
  t->c.view_epoch = vb->epoch;
  return TM_OK;
}

int tm_tensor_requires_grad(const tm_tensor *t) {
  tm_tensor *m = (tm_tensor *)t;                /* refreshing the history does not change what the tensor is */
  if (m->c.vb && refresh(m) != TM_OK) return 1; /* only a history takes memory; edge_of fails, or tries again */
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
static int edge_of(tm_tensor *t, tm_edge *e) {
  *e = (tm_edge){NULL, 0};
  if (!t || !tm_tensor_requires_grad(t)) return TM_OK;
  if (refresh(t) != TM_OK) return TM_EMEM;
  if (t->c.fn) {
    node_retain(t->c.fn);
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
  node_release(c->fn);
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
    node_retain(n->edge[i].node);
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
    if (edge_of(c->in[i], &n->edge[i]) != TM_OK) goto fail;
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
  node_release(n);
  return NULL;
}

/* Gives `t` the history (n, k); takes over one reference to n. */
static void set_history(tm_tensor *t, tm_node *n, int k) {
  move_retained(t, n, k);
  node_release(t->c.fn);
  t->c.fn = n, t->c.out_nr = k;
  t->c.flags &= (uint8_t)~TM_FLAG_REQUIRES_GRAD;
}

/* An in-place operator on a view: the base's new history is its old one with a window replaced. */
static int record_window(tm_tensor *view, tm_node *inner) {
  tm_viewbase *vb = view->c.vb;
  tm_node *n = node_new(NODE_WINDOW, inner->nin, 1, 0, 0, true);
  if (!n) {
    node_release(inner);
    return TM_EMEM;
  }
  n->inner = inner;
  node_release(inner->edge[0].node);
  inner->edge[0].node = NULL;
  memcpy(n->xm, inner->xm, (size_t)inner->nin * sizeof *n->xm);
  for (int i = 1; i < inner->nin; i++) {
    n->edge[i] = inner->edge[i];
    if (n->edge[i].node) node_retain(n->edge[i].node);
  }
  n->xm[0] = (tm_inmeta){.ndim = (int8_t)vb->ndim, .dtype = view->c.dtype, .device = view->c.device};
  memcpy(n->xm[0].size, vb->size, sizeof vb->size);
  memcpy(n->layout->stride, vb->stride, sizeof vb->stride);
  n->layout->offset = vb->offset;
  n->ym[0] = n->xm[0];
  meta_of(&n->window, view);
  layout_of(&n->window_layout, view);
  if (base_edge(vb, &n->edge[0]) != TM_OK) {
    node_release(n);
    return TM_EMEM;
  }
  node_release(vb->fn);
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
      node_retain(n);
      node_release(x->c.vb->fn);
      x->c.vb->fn = n, x->c.vb->out_nr = 0, x->c.vb->leaf = NULL;
      x->c.view_epoch = ++x->c.vb->epoch;
    }
    return TM_OK;
  }
  for (int k = 0; k < c->nout; k++) {
    if (!tm_is_float(c->out[k]->c.dtype)) continue;
    node_retain(n);
    set_history(c->out[k], n, k);
  }
  node_release(n);
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
  node_release(t->c.fn);
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
    if (edge_of(in[i], &n->edge[i]) != TM_OK) goto fail;
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
    if (edge_of(save[i], &e) != TM_OK) goto fail;
    s->c.fn = e.node, s->c.out_nr = e.out_nr;
  }
  for (int k = 0; k < nout; k++) {
    if (!out[k] || !tm_is_float(out[k]->c.dtype)) continue;
    meta_of(&n->ym[k], out[k]);
    node_retain(n);
    set_history(out[k], n, k);
    for (int i = 0; i < nin; i++)
      if (in[i] && in[i] != out[k] && in[i]->c.storage == out[k]->c.storage) out[k]->c.flags |= TM_FLAG_CUSTOM_VIEW;
  }
  n->id = tm_tally(&hook_ids, 1);
  int64_t id = n->id;
  node_release(n); /* without differentiable results it is gone, and Lua will hear that its id is dead */
  return id;
fail:
  node_release(n);
  return 0;
}

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
  node_retain(n);
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
    if ((code = edge_of(root[i], &edge)) != TM_OK) goto done;
    k = entry_of(e, edge.node, 1, &added);
    node_release(edge.node);
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
  if (edge_of(root, &edge) != TM_OK) return TM_EMEM;
  int k = entry_of(e, edge.node, 0, NULL), code;
  node_release(edge.node);
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
      if (edge_of(t, &e->input[e->ninput]) != TM_OK) goto fail;
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
    node_release(x->node);
  }
  for (int i = 0; i < e->ninput; i++) {
    node_release(e->input[i].node);
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
  if (s->result < 0 || !grad_mode) return s->t;
  tm_tensor *t = tm_tensor_alias(s->t);
  if (!t) return NULL;
  node_retain(n);
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
  if (n->op->flags & TM_OP_FIRST_ORDER && grad_mode)
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
      if (anomaly && has_nan(g))
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
  if (code == TM_OK && !e->retain) free_saved(n->kind == NODE_WINDOW ? n->inner : n);
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
  if (code == TM_OK && !e->retain) n->freed = n->nsaved > 0, free_saved(n);
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
