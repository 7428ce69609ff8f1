/* Norms, rotary embedding with the KV store, gated activations, argmax. Included by native.c. */

static void normalise(float *x, const float *weight, float eps, i64 n) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (i64 i = 0; i < n; i++) squares += x[i] * x[i];
    float scale = 1.0f / __builtin_sqrtf(squares / n + eps);
#pragma omp simd
    for (i64 i = 0; i < n; i++) x[i] = x[i] * scale * weight[i];
}

typedef struct {
    const void *x;
    void *residual, *out; /* residual: NULL for a plain norm */
    const float *weight, *post_weight;
    i64 n;
    float eps;
    int is_bf16;
} Norm;

static void norm_rows(const void *arg, i64 begin, i64 end) {
    const Norm *a = arg;
    float x[a->n], sum[a->n];
    for (i64 t = begin; t < end; t++) {
        load(x, a->x, t * a->n, a->n, a->is_bf16);
        if (a->residual) {
            if (a->post_weight) normalise(x, a->post_weight, a->eps, a->n);
            load(sum, a->residual, t * a->n, a->n, a->is_bf16);
#pragma omp simd
            for (i64 i = 0; i < a->n; i++) sum[i] += x[i];
            store(a->residual, t * a->n, sum, a->n, a->is_bf16);
            load(x, a->residual, t * a->n, a->n, a->is_bf16); /* the norm sees the residual as stored */
        }
        normalise(x, a->weight, a->eps, a->n);
        store(a->out, t * a->n, x, a->n, a->is_bf16);
    }
}

EXPORT void rms_norm(const void *x, void *residual, void *out, const float *weight, const float *post_weight, i64 t,
                     i64 n, float eps, i64 is_bf16) {
    Norm a = {x, residual, out, weight, post_weight, n, eps, is_bf16};
    parallel(norm_rows, &a, t, grain_of_rows(n));
}

typedef struct {
    const void *qkv;
    void *q, *k_cache, *v_cache;
    const float *q_weight, *k_weight, *cos_sin;
    const int32_t *positions, *out_loc;
    i64 heads, kv_heads, dim, rotary;
    float eps;
    int is_bf16;
} Rope;

static void rope_tokens(const void *arg, i64 begin, i64 end) {
    const Rope *a = arg;
    i64 dim = a->dim, half = a->rotary / 2, all = a->heads + 2 * a->kv_heads;
    float x[dim];
    for (i64 t = begin; t < end; t++) {
        const float *cosine = a->cos_sin + a->positions[t] * a->rotary, *sine = cosine + half;
        i64 stored = a->out_loc[t] * a->kv_heads * dim;
        for (i64 h = 0; h < a->heads + a->kv_heads; h++) {
            int is_query = h < a->heads;
            load(x, a->qkv, (t * all + h) * dim, dim, a->is_bf16);
            if (a->q_weight) normalise(x, is_query ? a->q_weight : a->k_weight, a->eps, dim);
#pragma omp simd
            for (i64 i = 0; i < half; i++) {
                float first = x[i], second = x[i + half];
                x[i] = first * cosine[i] - second * sine[i];
                x[i + half] = second * cosine[i] + first * sine[i];
            }
            if (is_query)
                store(a->q, (t * a->heads + h) * dim, x, dim, a->is_bf16);
            else
                store(a->k_cache, stored + (h - a->heads) * dim, x, dim, a->is_bf16);
        }
        i64 values = (t * all + a->heads + a->kv_heads) * dim, size = a->is_bf16 ? 2 : 4;
        memcpy((char *)a->v_cache + stored * size, (const char *)a->qkv + values * size, a->kv_heads * dim * size);
    }
}

EXPORT void rope_and_store(const void *qkv, void *q, void *k_cache, void *v_cache, const float *q_weight,
                           const float *k_weight, const float *cos_sin, const int32_t *positions,
                           const int32_t *out_loc, i64 t, i64 heads, i64 kv_heads, i64 dim, i64 rotary, float eps,
                           i64 is_bf16) {
    Rope a = {qkv,     q,     k_cache,  v_cache, q_weight, k_weight, cos_sin, positions,
              out_loc, heads, kv_heads, dim,     rotary,   eps,      is_bf16};
    parallel(rope_tokens, &a, t, grain_of_rows((heads + 2 * kv_heads) * dim));
}

typedef struct {
    const void *gate_up;
    void *out;
    i64 n;
    int gelu, is_bf16;
} Gated;

static void gated_rows(const void *arg, i64 begin, i64 end) {
    const Gated *a = arg;
    enum { PIECE = 512 };
    float gate[PIECE], up[PIECE];
    for (i64 t = begin; t < end; t++)
        for (i64 piece = 0; piece < a->n; piece += PIECE) {
            i64 n = MIN(PIECE, a->n - piece);
            load(gate, a->gate_up, t * 2 * a->n + piece, n, a->is_bf16);
            load(up, a->gate_up, (t * 2 + 1) * a->n + piece, n, a->is_bf16);
            /* gelu by tanh is x * sigmoid(2 u), silu is x * sigmoid(x) */
            float cubic = a->gelu ? 1.59576912f * 0.044715f : 0.0f, linear = a->gelu ? 1.59576912f : 1.0f;
#pragma omp simd
            for (i64 i = 0; i < n; i++) {
                float x = gate[i], u = x * (linear + cubic * x * x);
                gate[i] = x / (1.0f + exp_f(-u)) * up[i];
            }
            store(a->out, t * a->n + piece, gate, n, a->is_bf16);
        }
}

EXPORT void gated(const void *gate_up, void *out, i64 t, i64 n, i64 gelu, i64 is_bf16) {
    Gated a = {gate_up, out, n, gelu, is_bf16};
    parallel(gated_rows, &a, t, grain_of_rows(2 * n));
}

typedef struct {
    const void *logits;
    i64 *out;
    i64 n;
    int is_bf16;
} Argmax;

/* Finds the first piece that holds the maximum, then the first place in it. */
static void argmax_rows(const void *arg, i64 begin, i64 end) {
    const Argmax *a = arg;
    enum { PIECE = 1024 };
    float x[PIECE];
    for (i64 r = begin; r < end; r++) {
        float best = -__builtin_inff();
        i64 best_piece = 0, best_index = 0;
        for (i64 piece = 0; piece < a->n; piece += PIECE) {
            i64 n = MIN(PIECE, a->n - piece);
            load(x, a->logits, r * a->n + piece, n, a->is_bf16);
            float top[LANES], highest = -__builtin_inff();
            for (int j = 0; j < LANES; j++) top[j] = highest;
            for (i64 i = 0; i < n / LANES * LANES; i += LANES)
                for (int j = 0; j < LANES; j++) top[j] = x[i + j] > top[j] ? x[i + j] : top[j];
            for (i64 i = n / LANES * LANES; i < n; i++) highest = MAX(highest, x[i]);
            for (int j = 0; j < LANES; j++) highest = MAX(highest, top[j]);
            if (highest > best) best = highest, best_piece = piece;
        }
        load(x, a->logits, r * a->n + best_piece, MIN(PIECE, a->n - best_piece), a->is_bf16);
        for (i64 i = MIN(PIECE, a->n - best_piece) - 1; i >= 0; i--)
            if (x[i] == best) best_index = best_piece + i;
        a->out[r] = best_index;
    }
}

EXPORT void argmax(const void *logits, i64 *out, i64 rows, i64 n, i64 is_bf16) {
    Argmax a = {logits, out, n, is_bf16};
    parallel(argmax_rows, &a, rows, 1);
}
