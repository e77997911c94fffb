/* graph.h: what the graph (autograd.c) and those who walk it (engine.c) share. */
#ifndef TMOD_GRAPH_H
#define TMOD_GRAPH_H
#include "internal.h"

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

void tm_node_retain(tm_node *n);
void tm_node_release(tm_node *n);       /* takes NULL; frees without recursion */
void tm_node_drop_saved(tm_node *n);
const char *tm_node_name(const tm_node *n);
int tm_edge_of(tm_tensor *t, tm_edge *e); /* where gradients of t go; node NULL: nowhere; new reference */

#endif
