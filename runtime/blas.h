/* blas.h: matrix products of plain memory, below tensors. */
#ifndef TMOD_BLAS_H
#define TMOD_BLAS_H
#include "internal.h"

/* C := alpha * op(A) * op(B) + beta * C, all row-major: op(A) is (m, k), op(B) is (k, n), C is (m, n).
** trans 0: the operand lies as it is used; 1: its transpose lies there. ld: elements from row to row as it
** lies, at least the length of a row. C must not overlap A or B. beta 0 overwrites C, whatever it holds.
** Every dtype but bool; whole numbers wrap. Fails with TM_EMEM or TM_EINTERRUPT. */
int tm_gemm(int dtype, int transa, int transb, int64_t m, int64_t n, int64_t k, double alpha, const void *a, int64_t lda,
            const void *b, int64_t ldb, double beta, void *c, int64_t ldc);

#endif
