/* Causal paged attention with an online softmax (Milakov and Gimelshein, 2018), queries in blocks as in FlashAttention-2
   and keys in splits as in FlashDecoding. Included by native.c.

   A group is (row of the batch, KV head, block of queries). Its score rows are the block's tokens times the query heads
   that share the KV head, so that each key is read once for all of them. Keys go in blocks of BLOCK and splits of SPLIT,
   both aligned to absolute positions. A group that is the only block of its row, as in decode, gives each split to
   whichever thread is free; other groups take their splits in turn. Both fold the splits in the same order, so that the
   results are the same bits. */

enum { BLOCK = 32, SPLIT = 512, SCORE_ROWS = 64 };
static const float NOTHING = -1e30f; /* a maximum over no key: finite, so that differences are never NaN */

typedef struct {
    const void *q, *k_cache, *v_cache;
    void *out;
    const int32_t *q_start, *kv_len, *slots, *page_table;
    i64 rows, table_width, page_size, heads, kv_heads, dim, window; /* window 0: none */
    float scale, soft_cap;                                          /* soft_cap 0: none */
    int is_bf16;
} Attention;

typedef struct {
    i64 row, kv_head, token, tokens; /* the group: `tokens` queries from `token` of the step on */
    i64 position;                    /* of its first query */
    i64 split, splits;               /* the splits that this item computes, */
    float *partial;                  /* where to leave the state of its score rows, or NULL to write the output */
} Item;

INLINE i64 heads_sharing(const Attention *a) { return a->heads / a->kv_heads; }
INLINE i64 score_rows(const Attention *a, const Item *it) { return it->tokens * heads_sharing(a); }
INLINE i64 tile_up(i64 rows) { return (rows + 3) / 4 * 4; } /* score rows are computed four at a time */

/* The first position that a query at `position` sees. */
INLINE i64 oldest_seen(const Attention *a, i64 position) { return a->window ? MAX(0, position - a->window + 1) : 0; }

/* Where the head of score row r lies in q and in the output. */
INLINE i64 place_of_row(const Attention *a, const Item *it, i64 r) {
    i64 shared = heads_sharing(a);
    return ((it->token + r / shared) * a->heads + it->kv_head * shared + r % shared) * a->dim;
}

/* Where the key, and the value, of a position lies in the cache. */
INLINE i64 place_of_key(const Attention *a, const Item *it, i64 position) {
    const int32_t *pages = a->page_table + a->slots[it->row] * a->table_width;
    i64 token = pages[position / a->page_size] * a->page_size + position % a->page_size;
    return (token * a->kv_heads + it->kv_head) * a->dim;
}

/* The state of `rows` score rows: the maximum and sum of the weights so far, and the weighted sum of values. */
typedef struct {
    float *max, *sum, *acc;
} State;

INLINE i64 state_size(i64 rows, i64 width) { return rows * (width + 2); }
INLINE State state_at(float *memory, i64 rows) { return (State){memory, memory + rows, memory + 2 * rows}; }

static void clear(State s, i64 rows, i64 width) {
    for (i64 r = 0; r < rows; r++) s.max[r] = NOTHING, s.sum[r] = 0;
    memset(s.acc, 0, rows * width * sizeof(float));
}

/* total += part */
static void fold(State total, State part, i64 rows, i64 width) {
    for (i64 r = 0; r < rows; r++) {
        float max = MAX(total.max[r], part.max[r]);
        float old = exp_f(total.max[r] - max), new = exp_f(part.max[r] - max);
        total.max[r] = max;
        total.sum[r] = total.sum[r] * old + part.sum[r] * new;
#pragma omp simd
        for (i64 i = 0; i < width; i++)
            total.acc[r * width + i] = total.acc[r * width + i] * old + part.acc[r * width + i] * new;
    }
}

static void finish(const Attention *a, const Item *it, State s, i64 width) {
    for (i64 r = 0; r < score_rows(a, it); r++) {
        float *acc = s.acc + r * width, scale = 1.0f / s.sum[r];
#pragma omp simd
        for (i64 i = 0; i < a->dim; i++) acc[i] *= scale;
        store(a->out, place_of_row(a, it, r), acc, a->dim, a->is_bf16);
    }
}

/* --- products --- */

/* A score is a dot product over pairs of bfloat16 where the CPU has that instruction (`pairs`: exact products, float32
   sums), over floats elsewhere. `width` is the head dim rounded up to STEP, with zeros behind. */
#ifdef __AVX512BF16__
#define NATIVE_DOT 1
#else
#define NATIVE_DOT 0
#endif
enum { STEP = 2 * LANES };

INLINE float sum_lanes(vf v) {
    float s = 0;
#if defined(__AVX512F__) && defined(__AVX512BF16__)
    s = _mm512_reduce_add_ps((__m512)v);
#else
    for (int i = 0; i < LANES; i++) s += v[i];
#endif
    return s;
}

/* scores[r * BLOCK + j] = q row r . key j, for `rows` rows and `keys` keys, both constants. */
INLINE void dot_tile(const int rows, const int keys, const int pairs, const void *q, i64 width, const void *const *k,
                     float *scores) {
    vf acc[4][4];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < keys; j++) acc[r][j] = (vf){0};
    if (pairs) {
#ifdef __AVX512BF16__
        for (i64 i = 0; i < width; i += 2 * LANES)
            UNROLL for (int j = 0; j < keys; j++) {
                __m512bh key = (__m512bh)_mm512_loadu_si512((const bf16 *)k[j] + i);
                UNROLL for (int r = 0; r < rows; r++) {
                    __m512bh query = (__m512bh)_mm512_loadu_si512((const bf16 *)q + r * width + i);
                    acc[r][j] = (vf)_mm512_dpbf16_ps((__m512)acc[r][j], query, key);
                }
            }
#endif
    } else {
        for (i64 i = 0; i < width; i += LANES)
            UNROLL for (int j = 0; j < keys; j++) {
                vf key = *(const vf *)((const float *)k[j] + i);
                UNROLL for (int r = 0; r < rows; r++)
                    acc[r][j] += *(const vf *)((const float *)q + r * width + i) * key;
            }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int j = 0; j < keys; j++) scores[r * BLOCK + j] = sum_lanes(acc[r][j]);
}

/* acc[r][0 .. vectors * LANES) += sum over keys begin .. end - 1 of p[r * BLOCK + j] * values[j] */
INLINE void value_tile(const int rows, const int vectors, const float *p, const float *const *v, i64 column, i64 begin,
                       i64 end, float *acc, i64 width) {
    vf sum[4][4];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < vectors; i++) sum[r][i] = *(vf *)(acc + r * width + i * LANES);
    for (i64 j = begin; j < end; j++) {
        const vf *value = (const vf *)(v[j] + column);
        UNROLL for (int r = 0; r < rows; r++) {
            float weight = p[r * BLOCK + j];
            UNROLL for (int i = 0; i < vectors; i++) sum[r][i] += weight * value[i];
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < vectors; i++) *(vf *)(acc + r * width + i * LANES) = sum[r][i];
}

INLINE void scores_of_rows(const int rows, int pairs, const void *q, i64 width, const void *const *k, i64 keys,
                           float *scores) {
    if (pairs)
        for (i64 j = 0; j < keys; j += 4) dot_tile(rows, 4, 1, q, width, k + j, scores + j);
    else
        for (i64 j = 0; j < keys; j += 4) dot_tile(rows, 4, 0, q, width, k + j, scores + j);
}

INLINE void values_of_rows(const int rows, const float *p, const float *const *v, i64 begin, i64 end, float *acc,
                           i64 width) {
    i64 i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES) value_tile(rows, 4, p, v, i, begin, end, acc + i, width);
    for (; i < width; i += STEP) value_tile(rows, 2, p, v, i, begin, end, acc + i, width);
}

/* --- one block of keys --- */

typedef struct {
    const void *k[BLOCK];
    const float *v[BLOCK];
    char *k_copy; /* BLOCK rows of the width, for keys that cannot be read in place */
    float *v_copy;
} Block;

INLINE void prefetch_key(const Attention *a, i64 place) {
    i64 size = a->is_bf16 ? 2 : 4;
    for (i64 line = 0; line < a->dim * size; line += 64) {
        __builtin_prefetch((const char *)a->k_cache + place * size + line);
        __builtin_prefetch((const char *)a->v_cache + place * size + line);
    }
}

/* Points the block at the keys of positions base + [begin, end), and prefetches the next block. Places before them
   repeat the first key, places up to the next multiple of 4 the last one: those are multiplied too, but weigh nothing,
   and memory that is not the row's is never read. */
static void read_block(const Attention *a, const Item *it, i64 base, i64 begin, i64 end, i64 width, int pairs,
                       Block *b) {
    i64 dim = a->dim, whole = dim == width;
    for (i64 j = begin; j < end; j++) {
        i64 place = place_of_key(a, it, base + j), ahead = base + BLOCK + j;
        if (ahead < it->position + it->tokens) prefetch_key(a, place_of_key(a, it, ahead));
        if (whole && pairs == a->is_bf16) {
            b->k[j] = at(a->k_cache, place, a->is_bf16);
        } else if (pairs) {
            b->k[j] = memcpy(b->k_copy + j * width * 2, (const bf16 *)a->k_cache + place, dim * 2);
        } else {
            float *copy = (float *)b->k_copy + j * width;
            load(copy, a->k_cache, place, dim, a->is_bf16);
            b->k[j] = copy;
        }
        if (whole && !a->is_bf16) {
            b->v[j] = (const float *)a->v_cache + place;
        } else {
            load(b->v_copy + j * width, a->v_cache, place, dim, a->is_bf16);
            b->v[j] = b->v_copy + j * width;
        }
    }
    for (i64 j = 0; j < begin; j++) b->k[j] = b->k[begin];
    for (i64 j = end; j % 4; j++) b->k[j] = b->k[end - 1];
}

INLINE float largest(const float *x) {
    float top[LANES], max = NOTHING;
    for (int i = 0; i < LANES; i++) top[i] = x[i];
    for (int j = LANES; j < BLOCK; j += LANES)
        for (int i = 0; i < LANES; i++) top[i] = MAX(top[i], x[j + i]);
    for (int i = 0; i < LANES; i++) max = MAX(max, top[i]);
    return max;
}

/* Turns the scores of one row into weights against the running maximum; those outside [begin, end) weigh zero. */
static void weigh(const Attention *a, float *scores, int begin, int end, State s, i64 row, i64 width) {
    float sum = 0;
    if (a->soft_cap > 0)
        for (int j = 0; j < BLOCK; j++) scores[j] = a->soft_cap * tanh_f(scores[j] * a->scale / a->soft_cap);
    else
        for (int j = 0; j < BLOCK; j++) scores[j] *= a->scale;
    for (int j = 0; j < BLOCK; j++) scores[j] = (j >= begin) & (j < end) ? scores[j] : NOTHING;
    float max = MAX(s.max[row], largest(scores));
    for (int j = 0; j < BLOCK; j++) {
        float weight = exp_f(scores[j] - max);
        scores[j] = (j >= begin) & (j < end) ? weight : 0;
    }
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < BLOCK; j++) sum += scores[j];
    if (max > s.max[row]) {
        float shrink = exp_f(s.max[row] - max);
        s.max[row] = max;
        s.sum[row] *= shrink;
        for (i64 i = 0; i < width; i++) s.acc[row * width + i] *= shrink;
    }
    s.sum[row] += sum;
}

/* The keys of positions base + [begin, end) for all score rows of an item. */
static void attend_block(const Attention *a, const Item *it, const void *q, int pairs, i64 base, i64 begin, i64 end,
                         Block *b, State s, i64 width) {
    i64 shared = heads_sharing(a), rows = score_rows(a, it);
    float scores[4 * BLOCK] = {0};
    read_block(a, it, base, begin, end, width, pairs, b);
    for (i64 r = 0; r < rows; r += 4) {
        const void *qr = at(q, r * width, pairs);
        int alone = rows - r == 1;
        if (alone)
            scores_of_rows(1, pairs, qr, width, b->k, end, scores);
        else
            scores_of_rows(4, pairs, qr, width, b->k, end, scores);
        for (i64 i = r; i < MIN(r + 4, rows); i++) {
            i64 position = it->position + i / shared;
            i64 from = MAX(oldest_seen(a, position) - base, begin), to = MIN(position + 1 - base, end);
            weigh(a, scores + (i - r) * BLOCK, from, to, s, i, width);
        }
        if (alone)
            values_of_rows(1, scores, b->v, begin, end, s.acc + r * width, width);
        else
            values_of_rows(4, scores, b->v, begin, end, s.acc + r * width, width);
    }
}

static void attend_split(const Attention *a, const Item *it, const void *q, int pairs, i64 split, Block *b, State s,
                         i64 width) {
    i64 first = MAX(split * SPLIT, oldest_seen(a, it->position));
    i64 last = MIN((split + 1) * SPLIT, it->position + it->tokens);
    for (i64 base = first / BLOCK * BLOCK; base < last; base += BLOCK)
        attend_block(a, it, q, pairs, base, MAX(first - base, 0), MIN(last - base, BLOCK), b, s, width);
}

/* --- items --- */

typedef struct {
    const Attention *a;
    const Item *items;
    i64 width, most_rows; /* most_rows: score rows of the largest item, a multiple of 4 */
} Work;

static void attend_items(const void *arg, i64 first, i64 last) {
    const Work *w = arg;
    const Attention *a = w->a;
    int pairs = NATIVE_DOT && a->is_bf16;
    i64 width = w->width, state = (state_size(w->most_rows, width) + 15) / 16 * 16, block = BLOCK * width;
    i64 floats = 2 * state + 2 * block + w->most_rows * width;
    float *total_memory = aligned_alloc(64, (floats + 15) / 16 * 64), *part_memory = total_memory + state;
    Block b = {.k_copy = (char *)(part_memory + state), .v_copy = part_memory + state + block};
    char *q = (char *)(b.v_copy + block);
    memset(b.k_copy, 0, (2 * block + w->most_rows * width) * sizeof(float)); /* zeros behind each head */

    for (i64 i = first; i < last; i++) {
        const Item *it = w->items + i;
        i64 rows = tile_up(score_rows(a, it));
        for (i64 r = 0; r < score_rows(a, it); r++) {
            if (pairs)
                memcpy(q + r * width * 2, (const bf16 *)a->q + place_of_row(a, it, r), a->dim * 2);
            else
                load((float *)q + r * width, a->q, place_of_row(a, it, r), a->dim, a->is_bf16);
        }
        State total = state_at(it->partial ? it->partial : total_memory, rows), part = state_at(part_memory, rows);
        clear(total, rows, width);
        for (i64 s = it->split; s < it->split + it->splits; s++) {
            clear(part, rows, width);
            attend_split(a, it, q, pairs, s, &b, part, width);
            fold(total, part, rows, width);
        }
        if (!it->partial) finish(a, it, total, width);
    }
    free(total_memory);
}

/* Lists the items of all rows, a row's longest first; with `items` NULL only counts them. Fills in w->most_rows. */
static i64 list_items(Work *w, Item *items, float *partials, i64 *partial_size) {
    const Attention *a = w->a;
    i64 count = 0, floats = 0, step = MAX(SCORE_ROWS / heads_sharing(a), 1);
    for (i64 row = 0; row < a->rows; row++) {
        i64 first = a->q_start[row], tokens = a->q_start[row + 1] - first, blocks = (tokens + step - 1) / step;
        for (i64 index = blocks * a->kv_heads - 1; index >= 0; index--) {
            Item it = {.row = row, .kv_head = index % a->kv_heads, .token = first + index / a->kv_heads * step};
            it.tokens = MIN(step, first + tokens - it.token);
            it.position = a->kv_len[row] - tokens + it.token - first;
            it.split = oldest_seen(a, it.position) / SPLIT;
            i64 end = (it.position + it.tokens - 1) / SPLIT + 1, rows = tile_up(score_rows(a, &it));
            int apart = blocks == 1 && end - it.split > 1;
            it.splits = apart ? 1 : end - it.split;
            for (; it.split < end; it.split += it.splits, count++) {
                if (items) items[count] = it;
                if (!apart) continue;
                if (items) items[count].partial = partials + floats;
                floats += state_size(rows, w->width);
            }
            w->most_rows = MAX(w->most_rows, rows);
        }
    }
    *partial_size = floats;
    return count;
}

/* Folds the partial states of each group that was split, whose items follow one another, and writes the output. */
static void fold_items(const Work *w, i64 count) {
    for (i64 i = 0, next; i < count; i = next) {
        const Item *it = w->items + i;
        i64 rows = tile_up(score_rows(w->a, it));
        State total = state_at(it->partial, rows);
        for (next = i + 1; next < count; next++) {
            const Item *other = w->items + next;
            if (other->token != it->token || other->kv_head != it->kv_head) break;
            fold(total, state_at(other->partial, rows), rows, w->width);
        }
        if (it->partial) finish(w->a, it, total, w->width);
    }
}

EXPORT void attention(const void *q, const void *k_cache, const void *v_cache, void *out, const int32_t *q_start,
                      const int32_t *kv_len, const int32_t *slots, const int32_t *page_table, i64 rows, i64 table_width,
                      i64 page_size, i64 heads, i64 kv_heads, i64 dim, i64 window, float scale, float soft_cap,
                      i64 is_bf16) {
    Attention a = {q,         k_cache, v_cache,  out, q_start, kv_len, slots,    page_table, rows, table_width,
                   page_size, heads,   kv_heads, dim, window,  scale,  soft_cap, is_bf16};
    Work w = {.a = &a, .width = (dim + STEP - 1) / STEP * STEP};
    i64 floats, count = list_items(&w, NULL, NULL, &floats);
    float *partials = malloc(floats * sizeof(float));
    Item *items = malloc(count * sizeof(Item));
    list_items(&w, items, partials, &floats);
    w.items = items;
    parallel(attend_items, &w, count, 1);
    if (floats) fold_items(&w, count);
    free(items);
    free(partials);
}
