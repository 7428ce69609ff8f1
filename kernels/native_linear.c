/* y = x W^T + bias for packed weights. Included by native.c.

   W [n, k] is packed into panels of PANEL outputs: panel, then k (in steps of two bfloat16 or one float32), then output.
   A tile multiplies up to TILE_ROWS rows of x with one panel, all sums in registers. A panel comes from memory once for
   CHUNK rows while the next one is prefetched, so that few rows run at the speed of the memory and many at that of the
   multipliers. */

enum { PANEL = 2 * LANES, CHUNK = 8 * TILE_ROWS };

typedef struct {
    const void *x, *packed;
    const float *bias; /* [n rounded up to panels] or NULL */
    void *y;
    i64 m, n, k;
    int is_bf16;
} Linear;

static void pack_panels(const void *arg, i64 begin, i64 end) {
    const Linear *a = arg;
    i64 step = a->is_bf16 ? 2 : 1, size = a->is_bf16 ? 2 : 4;
    for (i64 panel = begin; panel < end; panel++) {
        char *to = (char *)a->y + panel * PANEL * a->k * size;
        for (i64 j = 0; j < PANEL; j++) {
            i64 output = panel * PANEL + j;
            for (i64 i = 0; i < a->k / step; i++) {
                char *place = to + (i * PANEL + j) * 4;
                if (output < a->n)
                    memcpy(place, at(a->x, output * a->k + i * step, a->is_bf16), 4);
                else
                    memset(place, 0, 4);
            }
        }
    }
}

/* Packs w [n, k] into `packed` [n rounded up to panels, k]; k must be even for bfloat16. */
EXPORT void pack_linear(const void *w, void *packed, i64 n, i64 k, i64 is_bf16) {
    Linear a = {.x = w, .y = packed, .n = n, .k = k, .is_bf16 = is_bf16};
    parallel(pack_panels, &a, (n + PANEL - 1) / PANEL, 8);
}

EXPORT i64 panel_size(void) { return PANEL; }

/* Bit 0: bfloat16 products have an instruction. Bit 1: the CPU has matrix units (AMX), which oneDNN uses. */
EXPORT i64 features(void) {
    int found = 0;
#ifdef __AVX512BF16__
    found |= 1;
#endif
#ifdef __AMX_BF16__
    found |= 2;
#endif
    return found;
}

/* Not inlined, so that the sums of linear_tile stay in registers. */
static __attribute__((noinline)) void write_tile(const Linear *a, int rows, i64 first, i64 panel,
                                                 float (*sums)[PANEL]) {
    i64 columns = MIN(PANEL, a->n - panel * PANEL);
    for (int r = 0; r < rows; r++) {
        i64 to = (first + r) * a->n + panel * PANEL;
        if (columns == PANEL)
            store(a->y, to, sums[r], PANEL, a->is_bf16);
        else
            store(a->y, to, sums[r], columns, a->is_bf16);
    }
}

/* `rows` rows from `first` on of one panel; each step prefetches a cache line from `next` on, half a panel in all. */
INLINE void linear_tile(const int rows, const int is_bf16, const Linear *a, i64 first, i64 panel, const char *next) {
    vf acc[TILE_ROWS][2]; /* of constant size and indexed by unrolled loops: registers */
    UNROLL for (int r = 0; r < rows; r++)
        for (int h = 0; h < 2; h++) acc[r][h] = a->bias ? *(const vf *)(a->bias + panel * PANEL + h * LANES) : (vf){0};
    const char *w = at(a->packed, panel * PANEL * a->k, is_bf16), *x = at(a->x, first * a->k, is_bf16);
    i64 row_bytes = a->k * (is_bf16 ? 2 : 4);
    for (i64 i = 0; i < row_bytes; i += 4, w += 4 * PANEL, next += 64) {
        __builtin_prefetch(next, 0, 2);
        if (is_bf16) {
#ifdef __AVX512BF16__
            __m512bh w0 = (__m512bh)_mm512_loadu_si512(w), w1 = (__m512bh)_mm512_loadu_si512(w + 64);
            UNROLL for (int r = 0; r < rows; r++) {
                int32_t pair;
                memcpy(&pair, x + r * row_bytes + i, 4);
                acc[r][0] = (vf)_mm512_dpbf16_ps((__m512)acc[r][0], w0, (__m512bh)_mm512_set1_epi32(pair));
                acc[r][1] = (vf)_mm512_dpbf16_ps((__m512)acc[r][1], w1, (__m512bh)_mm512_set1_epi32(pair));
            }
#endif
        } else {
            vf w0 = *(const vf *)w, w1 = *(const vf *)(w + 4 * LANES);
            UNROLL for (int r = 0; r < rows; r++) {
                float value = *(const float *)(x + r * row_bytes + i); /* broadcast by the load: no port for it */
                acc[r][0] += value * w0;
                acc[r][1] += value * w1;
            }
        }
    }
    float sums[TILE_ROWS][PANEL];
    UNROLL for (int r = 0; r < rows; r++) {
        *(vf *)sums[r] = acc[r][0];
        *(vf *)(sums[r] + LANES) = acc[r][1];
    }
    write_tile(a, rows, first, panel, sums);
}

static void linear_rows(int rows, const Linear *a, i64 first, i64 panel, const char *next) {
#define TILE(R)                                                          \
    case R:                                                              \
        if (a->is_bf16)                                                  \
            linear_tile(R, 1, a, first, panel, next);                    \
        else                                                             \
            linear_tile(R, 0, a, first, panel, next);                    \
        break;
    switch (rows) {
        TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#if TILE_ROWS > 6
        TILE(7) TILE(8) TILE(9) TILE(10)
#endif
    }
#undef TILE
}

/* Piece i is panel i % panels for chunk i / panels of the rows. */
static void linear_pieces(const void *arg, i64 begin, i64 end) {
    const Linear *a = arg;
    i64 panels = (a->n + PANEL - 1) / PANEL;
    for (i64 i = begin; i < end; i++) {
        i64 panel = i % panels, start = i / panels * CHUNK, rows = MIN(CHUNK, a->m - start);
        i64 tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
        for (i64 t = 0; t < tiles; t++) {
            i64 from = rows * t / tiles, to = rows * (t + 1) / tiles;
            i64 half = t < 2 ? 2 + t : 0; /* in half panels: the first two tiles prefetch the next panel */
            const char *next = at(a->packed, (2 * panel + half) * PANEL * a->k / 2, a->is_bf16);
            linear_rows(to - from, a, start + from, panel, next);
        }
    }
}

/* For bfloat16 only where features() says that its products have an instruction. */
EXPORT void linear(const void *x, const void *packed, const float *bias, void *y, i64 m, i64 n, i64 k, i64 is_bf16) {
    Linear a = {x, packed, bias, y, m, n, k, is_bf16};
    i64 pieces = (n + PANEL - 1) / PANEL * ((m + CHUNK - 1) / CHUNK);
    parallel(linear_pieces, &a, pieces, pieces / 32);
}
