/* vjp.c: the words that gradients are written in, beside those that internal.h makes from one-line rows. Each runs
** an operator with its arguments laid out as in the row, so it records in the graph when a second derivative is wanted. */
#include "internal.h"

tm_tensor *v_add(tm_vjp *v, tm_tensor *x, tm_tensor *y) { return v_run(v, TM_OPC_add, 2, (tm_tensor *[]){x, y}, (double[]){1}, NULL); }
tm_tensor *v_sub(tm_vjp *v, tm_tensor *x, tm_tensor *y) { return v_run(v, TM_OPC_sub, 2, (tm_tensor *[]){x, y}, (double[]){1}, NULL); }
tm_tensor *v_num(tm_vjp *v, double value) { return v_keep(v, tm_tensor_wrapped(value)); }
tm_tensor *v_scale(tm_vjp *v, tm_tensor *x, double by) { return by == 1 ? x : v_mul(v, x, v_num(v, by)); }
tm_tensor *v_shift(tm_vjp *v, tm_tensor *x, double by) { return v_add(v, x, v_num(v, by)); }

tm_tensor *v_where(tm_vjp *v, tm_tensor *c, tm_tensor *x, tm_tensor *y) {
  return v_run(v, TM_OPC_where, 3, (tm_tensor *[]){c, x, y}, NULL, NULL);
}

tm_tensor *v_sum(tm_vjp *v, tm_tensor *x, int ndims, const int64_t *dims, int keepdim) {
  return v_run(v, TM_OPC_sum, 1, &x, (double[]){ndims, keepdim, -1}, (const int64_t *[]){dims, NULL, NULL});
}

tm_tensor *v_sum1(tm_vjp *v, tm_tensor *x, int dim, int keepdim) { return v_sum(v, x, 1, (int64_t[]){dim}, keepdim); }

tm_tensor *v_transpose(tm_vjp *v, tm_tensor *x, int d0, int d1) { return v_run(v, TM_OPC_transpose, 1, &x, (double[]){d0, d1}, NULL); }

tm_tensor *v_reshape(tm_vjp *v, tm_tensor *x, int ndim, const int64_t *size) {
  return v_run(v, TM_OPC_reshape, 1, &x, (double[]){ndim}, (const int64_t *[]){size});
}

tm_tensor *v_expand(tm_vjp *v, tm_tensor *x, int ndim, const int64_t *size) {
  return v_run(v, TM_OPC_expand, 1, &x, (double[]){ndim}, (const int64_t *[]){size});
}

tm_tensor *v_unsqueeze(tm_vjp *v, tm_tensor *x, int dim) { return v_run(v, TM_OPC_unsqueeze, 1, &x, (double[]){dim}, NULL); }

tm_tensor *v_cast(tm_vjp *v, tm_tensor *x, int dtype) {
  return !x || x->c.dtype == dtype ? x : v_run(v, TM_OPC_cast, 1, &x, (double[]){dtype, -1}, NULL);
}

tm_tensor *v_zeros(tm_vjp *v, const tm_inmeta *like) { return v_full(v, like, 0); }

tm_tensor *v_full(tm_vjp *v, const tm_inmeta *like, double value) {
  return v_run(v, TM_OPC_full, 0, NULL, (double[]){like->ndim, value, like->dtype, like->device},
               (const int64_t *[]){like->size, NULL, NULL, NULL});
}
