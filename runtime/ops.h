/* ops.h: every operator, once.
**
** A row: OP(name, signature, rule, gradient, saves, flags, meaning). The functions it names are found by name:
**   tm_infer_<rule>   checks the call, gives shapes and dtypes of the results (runs on every device, and is
**                     all that the meta device needs)
**   tm_<name>_cpu     the kernel (a VIEW row has none: its rule makes the result share the input's storage)
**   tm_<name>_vjp     the gradient, when the column says `diff` (`none`: the results never require grad)
** A missing one is a link error.
**
** Signature: arguments separated by ", ", each `name`, `name:type` or `name:type=default`. Types:
**   (none) tensor      tensor?  or absent        operand  tensor or number     tensors  list of tensors, last
**   num  number        num?                      int  whole number             bool
**   dim  axis          dim?  axis or absent      newdim  axis of the result    dims?  axis, list or absent = all
**   index  position    shape  sizes              ints  whole numbers           dtype?  device?
**   enum(a|b)  one of the words; C sees its number from 0
** dim, newdim, dims and index count from 1 in Lua (negative: from the end); C gets them from 0, dims
** normalised, a negative index left to the rule that knows the size. `name` of an argument in `ids` position
** (targets, index tensors) holds 1-based positions in memory: kernels read them with tm_position.
**
** Saves: which values the gradient of which input reads: "a=b b=a" (b for a's gradient, a for b's);
** "x=y0" the first result; "x=x,y0" both. An input that is not listed needs none.
** Flags: I an in-place form name_ exists, O only that form exists (argument 0 is changed), R random,
** F the gradient cannot be differentiated again, H hidden from Lua's tensor methods (used by other code). */
#define TM_OPS(OP, VIEW) \
  /* creation */ \
  OP(empty, "shape:shape, dtype:dtype?, device:device?", create, none, "", H, "tensor with uninitialised elements") \
  OP(full, "shape:shape, value:num, dtype:dtype?, device:device?", create, none, "", H, "tensor filled with value") \
  OP(arange, "first:num, last:num, step:num=1, dtype:dtype?, device:device?", arange, none, "", H, "first, first + step, ... up to but without last; int64 if all three are whole, unless dtype says else") \
  OP(linspace, "first:num, last:num, steps:int, dtype:dtype?, device:device?", linspace, none, "", H, "steps evenly spaced numbers, both ends included") \
  OP(eye, "n:int, m:int, dtype:dtype?, device:device?", eye, none, "", H, "(n, m) with ones on the diagonal") \
  OP(rand, "shape:shape, dtype:dtype?, device:device?", create, none, "", H|R, "uniform numbers of [0, 1)") \
  OP(randn, "shape:shape, dtype:dtype?, device:device?", create, none, "", H|R, "standard normal numbers") \
  OP(randint, "low:num, high:num, shape:shape, dtype:dtype?, device:device?", randint, none, "", H|R, "whole numbers of [low, high)") \
  OP(randperm, "n:int, dtype:dtype?, device:device?", randperm, none, "", H|R, "the positions 1..n in random order") \
  OP(bernoulli, "x", bernoulli, none, "", R, "1 with probability x, else 0") \
  OP(uniform, "x, low:num=0, high:num=1", random_inplace, none, "", O|R, "fills with uniform numbers of [low, high)") \
  OP(normal, "x, mean:num=0, std:num=1", random_inplace, none, "", O|R, "fills with normal numbers") \
  OP(dropout, "x, p:num=0.5", dropout, diff, "x=y1", R|H, "x / (1 - p) with probability 1 - p, else 0; and the mask") \
  /* copying */ \
  OP(clone, "x, contiguous:bool=false", clone, diff, "", 0, "copy of x; keeps dense strides unless contiguous") \
  OP(cast, "x, dtype:dtype?, device:device?", cast, diff, "", H, "x in another dtype or on another device") \
  OP(copy, "x, source:operand", copy, diff, "", O, "x := source, broadcast and converted") \
  OP(fill, "x, value:num", fill, diff, "", O, "x := value") \
  /* element-wise, one operand */ \
  OP(neg, "x", unary_signed, diff, "", I, "-x") \
  OP(abs, "x", unary, diff, "x=x", I, "|x|; gradient 0 at 0") \
  OP(sign, "x", unary, diff, "", I, "-1, 0 or 1; gradient 0") \
  OP(exp, "x", unary_float, diff, "x=y0", I, "e^x") \
  OP(log, "x", unary_float, diff, "x=x", I, "natural logarithm") \
  OP(sqrt, "x", unary_float, diff, "x=y0", I, "square root") \
  OP(tanh, "x", unary_float, diff, "x=y0", I, "hyperbolic tangent") \
  OP(sigmoid, "x", unary_float, diff, "x=y0", I, "1 / (1 + e^-x)") \
  OP(erf, "x", unary_float, diff, "x=x", I, "error function") \
  OP(expm1, "x", unary_float, diff, "x=y0", I, "e^x - 1, exact near 0") \
  OP(log1p, "x", unary_float, diff, "x=x", I, "log(1 + x), exact near 0") \
  OP(silu, "x", unary_float, diff, "x=x", I, "x * sigmoid(x)") \
  OP(silu_backward, "dy, x", binary_float, none, "", H, "dy times the slope of silu") \
  OP(gelu, "x, approximate:enum(none|tanh)=none", unary_float, diff, "x=x", I, "x times the chance that a standard normal number is below x; or an approximation of it") \
  OP(gelu_backward, "dy, x, approximate:enum(none|tanh)=none", binary_float, none, "", H, "dy times the slope of gelu") \
  OP(relu, "x", unary, diff, "x=y0", I, "max(x, 0); gradient 0 at 0") \
  OP(clamp, "x, min:num?, max:num?", clamp, diff, "x=x", I, "x limited to [min, max]; either may be absent") \
  OP(isnan, "x", predicate, none, "", 0, "true where x is not a number") \
  OP(isfinite, "x", predicate, none, "", 0, "true where x is neither infinite nor NaN") \
  OP(logical_not, "x", predicate, none, "", 0, "true where x is 0") \
  /* element-wise, two operands, broadcast */ \
  OP(add, "a:operand, b:operand, alpha:num=1", binary, diff, "", I, "a + alpha * b") \
  OP(sub, "a:operand, b:operand, alpha:num=1", binary_signed, diff, "", I, "a - alpha * b") \
  OP(mul, "a:operand, b:operand", binary, diff, "a=b b=a", I, "a * b") \
  OP(div, "a:operand, b:operand", binary_float, diff, "a=b b=a,b", I, "a / b, floating") \
  OP(pow, "a:operand, b:operand", binary, diff, "a=a,b b=a,b,y0", I, "a to the power b") \
  OP(maximum, "a:operand, b:operand", binary, diff, "a=a,b b=a,b", 0, "the larger; NaN if either is; gradient halved on ties") \
  OP(minimum, "a:operand, b:operand", binary, diff, "a=a,b b=a,b", 0, "the smaller; NaN if either is; gradient halved on ties") \
  OP(eq, "a:operand, b:operand", compare, none, "", 0, "a == b") \
  OP(ne, "a:operand, b:operand", compare, none, "", 0, "a != b") \
  OP(lt, "a:operand, b:operand", compare, none, "", 0, "a < b") \
  OP(le, "a:operand, b:operand", compare, none, "", 0, "a <= b") \
  OP(gt, "a:operand, b:operand", compare, none, "", 0, "a > b") \
  OP(ge, "a:operand, b:operand", compare, none, "", 0, "a >= b") \
  OP(logical_and, "a:operand, b:operand", compare, none, "", 0, "both are not 0") \
  OP(logical_or, "a:operand, b:operand", compare, none, "", 0, "one is not 0") \
  OP(logical_xor, "a:operand, b:operand", compare, none, "", 0, "just one is not 0") \
  OP(where, "condition, a:operand, b:operand", where, diff, "a=condition b=condition", H, "a where condition (bool), else b") \
  OP(masked_fill, "x, mask, value:num", masked_fill, diff, "x=mask", I, "value where mask (bool, broadcast to x), else x") \
  /* reductions */ \
  OP(sum, "x, dim:dims?, keepdim:bool=false, dtype:dtype?", sum, diff, "", 0, "sum over dims; whole numbers and bool add up in int64") \
  OP(mean, "x, dim:dims?, keepdim:bool=false, dtype:dtype?", mean, diff, "", 0, "mean over dims; floating dtypes only") \
  OP(prod, "x, dim:dim?, keepdim:bool=false, dtype:dtype?", prod, diff, "x=x", 0, "product over dim, or over all") \
  OP(amax, "x, dim:dims?, keepdim:bool=false", extremum, diff, "x=x,y0", 0, "largest over dims; gradient shared by ties") \
  OP(amin, "x, dim:dims?, keepdim:bool=false", extremum, diff, "x=x,y0", 0, "smallest over dims; gradient shared by ties") \
  OP(max, "x, dim:dim, keepdim:bool=false", extremum_dim, diff, "x=y1", H, "largest along dim and its first position (int64)") \
  OP(min, "x, dim:dim, keepdim:bool=false", extremum_dim, diff, "x=y1", H, "smallest along dim and its first position (int64)") \
  OP(argmax, "x, dim:dim?, keepdim:bool=false", arg, none, "", 0, "first position of the largest along dim, or in x flattened") \
  OP(argmin, "x, dim:dim?, keepdim:bool=false", arg, none, "", 0, "first position of the smallest along dim, or in x flattened") \
  OP(any, "x, dim:dims?, keepdim:bool=false", bool_reduce, none, "", 0, "true if one is not 0") \
  OP(all, "x, dim:dims?, keepdim:bool=false", bool_reduce, none, "", 0, "true if none is 0") \
  /* products */ \
  OP(matmul, "a, b", matmul, diff, "a=b b=a", 0, "(..., m, k) by (..., k, n) -> (..., m, n); a vector is a row on the left, a column on the right") \
  OP(addmm, "bias, a, b, beta:num=1, alpha:num=1", addmm, diff, "a=b b=a", 0, "beta * bias + alpha * (m, k) by (k, n); bias broadcasts to (m, n)") \
  OP(linear, "x, weight, bias:tensor?", linear, diff, "x=weight weight=x", H, "x (..., in) by weight (out, in) transposed, plus bias (out)") \
  OP(linear_int8, "x, weight, scale, bias:tensor?", linear_int8, diff, "x=weight,scale scale=x,weight", H, "x (..., in) by int8 weight (out, in) times scale (out), transposed, plus bias (out)") \
  /* softmax and losses */ \
  OP(softmax, "x, dim:dim=-1", softmax, diff, "x=y0", 0, "exp(x - max x) / sum, along dim") \
  OP(log_softmax, "x, dim:dim=-1", softmax, diff, "x=y0", 0, "x - max x - log sum exp(x - max x), along dim") \
  OP(nll_loss, "x, target, weight:tensor?, ignore_index:int=-100, reduction:enum(none|mean|sum)=mean", nll_loss, diff, "x=target,weight,y1", H, "-weight[target] * x[target] over classes (dim 2 of x, or the only one); and the sum of the weights used") \
  OP(nll_loss_backward, "dy, target, total, weight:tensor?, shape:shape, ignore_index:int=-100, reduction:enum(none|mean|sum)=mean", nll_loss_backward, diff, "dy=target,weight", H, "gradient of nll_loss for an x of that shape") \
  OP(mse_loss, "x, target, reduction:enum(none|mean|sum)=mean", mse_loss, diff, "x=x,target target=x,target", H, "(x - target)^2, shapes broadcast") \
  /* normalisation */ \
  OP(layer_norm, "x, weight:tensor?, bias:tensor?, count:int, eps:num=1e-5", layer_norm, diff, "x=x,weight,y1 weight=x,y1", H, "(x - mean) / sqrt(variance + eps) over the last count dims, times weight plus bias of their shape; and means and variances, (2, rows)") \
  OP(layer_norm_backward, "dy, x, stats, weight:tensor?, count:int, eps:num=1e-5, affine:bool=false", layer_norm_backward, none, "", H, "gradients of layer_norm: for x; for weight and bias if affine, (2, elements of a row)") \
  /* shapes: views */ \
  VIEW(view, "x, shape:shape", view, diff, "", 0, "the same elements in another shape; one size may be -1; an error if the strides forbid it") \
  VIEW(reshape, "x, shape:shape", reshape, diff, "", 0, "as view, but copies where the strides forbid a view") \
  VIEW(transpose, "x, dim0:dim, dim1:dim", transpose, diff, "", 0, "two dims exchanged") \
  VIEW(permute, "x, dims:dims", permute, diff, "", 0, "dims in another order") \
  VIEW(squeeze, "x, dim:dims?", squeeze, diff, "", 0, "without dims of size 1 (all, or those given)") \
  VIEW(unsqueeze, "x, dim:newdim", unsqueeze, diff, "", 0, "with a dim of size 1 at dim") \
  VIEW(expand, "x, shape:shape", expand, diff, "", 0, "dims of size 1 repeated without copying; -1 keeps a size") \
  VIEW(select, "x, dim:dim, index:index", select, diff, "", 0, "one position of dim, which goes away") \
  VIEW(narrow, "x, dim:dim, start:index, length:int", narrow, diff, "", 0, "length positions of dim from start on") \
  VIEW(slice, "x, dim:dim, first:index=1, last:index=-1, step:int=1", slice, diff, "", 0, "positions first..last of dim, every step-th; both ends included") \
  VIEW(as_strided, "x, shape:shape, strides:ints, offset:int=0", as_strided, diff, "", 0, "any view of x's storage; offset in elements") \
  /* joining and indexing */ \
  OP(cat, "tensors:tensors, dim:dim=1", cat, diff, "", H, "joined along dim; empty 1-D tensors are passed over") \
  OP(stack, "tensors:tensors, dim:newdim=1", stack, diff, "", H, "joined along a new dim") \
  OP(index_select, "x, dim:dim, index", index_select, diff, "x=index", 0, "the positions of dim that index (1-D) lists") \
  OP(index_add, "x, dim:dim, index, source", index_add, diff, "source=index", I, "x with source added at the positions of dim that index lists") \
  OP(gather, "x, dim:dim, index", gather, diff, "x=index", 0, "out[i][j] = x[i][index[i][j]], for dim 2") \
  OP(scatter_add, "x, dim:dim, index, source", scatter_add, diff, "source=index", I, "x[i][index[i][j]] += source[i][j], for dim 2") \
  OP(scatter, "x, dim:dim, index, source:operand", scatter, diff, "x=index source=index", I, "x[i][index[i][j]] = source[i][j], for dim 2") \
  OP(nonzero, "x", nonzero, none, "", 0, "positions of the elements that are not 0: (n, dims)") \
  OP(index, "x, indices:tensors", index, diff, "x=indices", H, "advanced indexing: one index tensor per dim, absent = whole dim; they broadcast") \
  OP(index_put, "x, source, indices:tensors, accumulate:bool=false", index_put, diff, "x=indices source=indices", I|H, "x with source (broadcast) written, or added, at the places of index") \
  /* optimizer updates: every tensor of the list but the gradients is changed */ \
  OP(sgd_step, "tensors:tensors, lr:num, momentum:num, dampening:num, weight_decay:num, nesterov:bool, maximize:bool, first:bool=false", optim_step, none, "", O|H, "list: n parameters, n gradients, then (momentum not 0) n momentum buffers, which become the gradient when first is true") \
  OP(adam_step, "tensors:tensors, lr:num, beta1:num, beta2:num, eps:num, weight_decay:num, decoupled:bool, amsgrad:bool, maximize:bool, step:num", optim_step, none, "", O|H, "list: n parameters, n gradients, n first moments, n second moments, then (amsgrad) n maxima; step counts from 1") \
  /* used by the engine */ \
  OP(restride, "x, strides:ints", restride, diff, "", H, "copy of x with these strides") \
  OP(fill_strided, "base, part, base_strides:ints, shape:shape, strides:ints, offset:int, accumulate:bool=false", fill_strided, diff, "", H, "copy of base in base_strides with part written, or added, into a strided window") \
  OP(prod_backward, "x, dy, dim:dim?, keepdim:bool=false", prod_backward, diff, "dy=x x=dy,x", H, "dy times the product of the others along dim: gradient of prod, right also where x is 0")
