/* Decoding: one token of each of B lanes through the whole stack, in one call.

   With few lanes the time is that of reading weights and caches from memory once, so everything here is about that:
   weights lie row after row, a thread reads the rows of its share, and a narrow weight is widened in registers. With
   many lanes a tile of 3 rows and 4 lanes is summed in registers, so that a weight read once serves all of them.

   One parallel region; threads meet five times a layer. Every lane has caches of its own, wherever they are: a token is
   written behind the W entries that it sees. Letters as everywhere: D, H, K, F, W, S, V.

   Compiled for AVX-512 and for AVX2; called from `block_recurrent.inference.native_decode`, which checks what comes in
   and lays out the structures below as 64-bit numbers. */

#include <immintrin.h>
#include <omp.h>
#include <sched.h>
#include <stdatomic.h>

#include "vectors.h"

#define TILE_ROWS 3 /* 3 x 4 sums, 3 weights and 1 input fill the 16 registers of AVX2 */
#define TILE_LANES 4
#define AHEAD 4096    /* bytes that are fetched before they are needed */
#define LONG_ROW 4096 /* bytes of a row that is read well without */
#define SPINS 1000 /* of a waiting thread: some tens of microseconds */
#define EPSILON 1e-6f

enum { FLOAT32, BFLOAT16, INT8 };
enum { STORE, RELU, ADD };

typedef struct {
    const void *weight;
    const float *scale; /* of each row, for int8 */
} Matrix;

typedef struct {
    Matrix joint, project, hidden, output; /* joint: to values, keys, queries, and queries to states, if any */
    const float *attention_norm, *mlp_norm;
    const float *scale, *state_scale; /* (H) */
    const float *bias;                /* (H, W), the oldest entry first */
    int64_t store, index;             /* which of a lane's two stores has the layer's cache, and where in it */
    int64_t view;                     /* which state it reads; -1: none */
} Layer;

typedef struct {
    int64_t layers, D, H, K, F, W, S, V;
    int64_t kind, cache_kind; /* precision of matrices, and of caches */
    const float *embedding, *final_norm;
    Matrix table;
    Layer layer[];
} Model;

/* Caches of some layers: (layers, keys and values, H, capacity, K) of one lane. */
typedef struct {
    void *data;
    int64_t step;     /* entries of K numbers from keys to values, and from layer to layer by two */
    int64_t capacity; /* from head to head */
    int64_t end;      /* where the token goes */
} Store;

typedef struct {
    int64_t token;
    Store store[2];
    const float *views; /* (states, 4, H, S, K): keys, values, and queries, which are not for tokens */
} Lane;

/* ---- Numbers in fewer bits ---------------------------------------------------------------------------------------- */

INLINE int64_t size_of(const int kind) { return kind == FLOAT32 ? 4 : kind == BFLOAT16 ? 2 : 1; }

/* LANES numbers from the i-th on. */
INLINE vector widened(const int kind, const void *from, int64_t i) {
    if (kind == FLOAT32) return *(const vector *)((const float *)from + i);
#ifdef __AVX512F__
    if (kind == BFLOAT16)
        return (vector)_mm512_slli_epi32(
            _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)((const uint16_t *)from + i))), 16);
    return (vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)((const int8_t *)from + i))));
#else
    if (kind == BFLOAT16)
        return (vector)_mm256_slli_epi32(
            _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)((const uint16_t *)from + i))), 16);
    return (vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)((const int8_t *)from + i))));
#endif
}

INLINE float widened_one(const int kind, const void *from, int64_t i) {
    if (kind == FLOAT32) return ((const float *)from)[i];
    if (kind == INT8) return ((const int8_t *)from)[i];
    union {
        uint32_t bits;
        float number;
    } x = {(uint32_t)((const uint16_t *)from)[i] << 16};
    return x.number;
}

/* Rounded to the nearest, of two the even one. */
INLINE void narrow(const int kind, const float *from, void *to, int n) {
    if (kind == FLOAT32) {
        memcpy(to, from, n * sizeof(float));
        return;
    }
    for (int i = 0; i < n; i++) {
        union {
            float number;
            uint32_t bits;
        } x = {from[i]};
        ((uint16_t *)to)[i] = (uint16_t)((x.bits + 0x7FFF + (x.bits >> 16 & 1)) >> 16);
    }
}

/* ---- Products ---------------------------------------------------------------------------------------------------- */

/* The sums of the numbers of each of four vectors. */
INLINE __m128 sums_of(const vector *x) {
    __m256 a[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
#ifdef __AVX512F__
        a[i] = _mm256_add_ps(_mm512_castps512_ps256((__m512)x[i]), _mm512_extractf32x8_ps((__m512)x[i], 1));
#else
        a[i] = (__m256)x[i];
#endif
    }
    __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
    return _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
}

/* Short rows that are read side by side are no pattern that the processor would see through. So while one tile is
   multiplied, the one at least AHEAD bytes further on is fetched: all rows of a thread are in one piece. */
INLINE int64_t ahead_of(int64_t row_bytes, int64_t tile_bytes) {
    return row_bytes >= LONG_ROW ? 0 : (AHEAD + tile_bytes - 1) / tile_bytes * tile_bytes;
}

INLINE void fetch(const char *from, const int bytes) {
#pragma GCC unroll 8
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

/* sums[row * 4 + lane] = w[row] . x[lane], for at most 4 rows of one lane, or TILE_ROWS rows of 4 lanes. */
INLINE void tile(const int kind, const int rows, const int lanes, int64_t ahead, const void *w, int64_t n,
                 const float *x, int64_t x_row, float *sums) {
    const int chains = lanes == 1 ? 2 : 1; /* a single lane has registers left for a second sum */
    vector sum[4][4] = {{{0}}};
    int64_t k = 0;
    for (; k + chains * LANES <= n; k += chains * LANES) {
        if (ahead)
            fetch((const char *)w + ahead + k * rows * size_of(kind), rows * chains * LANES * size_of(kind));
#pragma GCC unroll 2
        for (int c = 0; c < chains; c++) {
            vector weight[4];
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) weight[r] = widened(kind, w, r * n + k + c * LANES);
#pragma GCC unroll 4
            for (int l = 0; l < lanes; l++) {
                const vector input = *(const vector *)(x + l * x_row + k + c * LANES);
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) sum[r][lanes == 1 ? c : l] += weight[r] * input;
            }
        }
    }
    if (lanes == 1) { /* the four rows side by side */
        vector single[4];
        for (int r = 0; r < 4; r++) single[r] = sum[r][0] + sum[r][1];
        float side_by_side[4];
        _mm_storeu_ps(side_by_side, sums_of(single));
        for (int r = 0; r < rows; r++) sums[r * 4] = side_by_side[r];
    } else
        for (int r = 0; r < rows; r++) _mm_storeu_ps(sums + r * 4, sums_of(sum[r]));
    for (; k < n; k++)
        for (int r = 0; r < rows; r++)
            for (int l = 0; l < lanes; l++) sums[r * 4 + l] += widened_one(kind, w, r * n + k) * x[l * x_row + k];
}

INLINE void tile_of(const int kind, const int rows, int lanes, int64_t ahead, const void *w, int64_t n, const float *x,
                    int64_t x_row, float *sums) {
    if (lanes == 4 && !ahead) tile(kind, rows, 4, 0, w, n, x, x_row, sums);
    else if (lanes == 4) tile(kind, rows, 4, ahead, w, n, x, x_row, sums);
    else if (lanes == 3) tile(kind, rows, 3, ahead, w, n, x, x_row, sums);
    else if (lanes == 2) tile(kind, rows, 2, ahead, w, n, x, x_row, sums);
    else tile(kind, rows, 1, ahead, w, n, x, x_row, sums);
}

typedef struct {
    const float *x; /* (B, n) */
    float *out;     /* (B, out_row) */
    int64_t n, out_row, B;
    int what; /* to do with the sums */
} Product;

INLINE void finish(Product p, const float *sums, const float *scale, int64_t row, int rows, int64_t lane, int lanes) {
    for (int r = 0; r < rows; r++)
        for (int l = 0; l < lanes; l++) {
            float *to = p.out + (lane + l) * p.out_row + row + r, sum = sums[r * 4 + l];
            if (scale) sum *= scale[row + r];
            *to = p.what == ADD ? *to + sum : p.what == RELU && !(sum > 0) ? sum * 0 : sum;
        }
}

INLINE void rows_of_all_lanes(const int kind, const int rows, Product p, int64_t ahead, const void *w,
                              const float *scale, int64_t row) {
    float sums[16];
    for (int64_t lane = 0; lane < p.B; lane += TILE_LANES) {
        const int lanes = smaller(TILE_LANES, p.B - lane);
        tile_of(kind, rows, lanes, lane ? 0 : ahead, w, p.n, p.x + lane * p.n, p.n, sums);
        finish(p, sums, scale, row, rows, lane, lanes);
    }
}

/* Rows from first to last of a matrix of one kind. */
INLINE void product_of(const int kind, Product p, Matrix m, int64_t first, int64_t last, float *room) {
    int64_t row = first;
    const char *w = (const char *)m.weight;
    const int64_t bytes = p.n * size_of(kind), ahead = ahead_of(bytes, bytes * (p.B == 1 ? 4 : TILE_ROWS));
    if (p.B == 1) {
        float sums[16];
        for (; row + 4 <= last; row += 4) {
            tile(kind, 4, 1, ahead, w + row * bytes, p.n, p.x, p.n, sums);
            finish(p, sums, m.scale, row, 4, 0, 1);
        }
    } else
        for (; row + TILE_ROWS <= last; row += TILE_ROWS) {
            const void *rows = w + row * bytes;
            if (kind == FLOAT32 || p.B <= TILE_LANES) rows_of_all_lanes(kind, TILE_ROWS, p, ahead, rows, m.scale, row);
            else { /* widened once for all lanes */
                int64_t i = 0;
                for (; i + LANES <= TILE_ROWS * p.n; i += LANES) {
                    if (ahead) __builtin_prefetch((const char *)rows + ahead + i * size_of(kind));
                    *(vector *)(room + i) = widened(kind, rows, i);
                }
                for (; i < TILE_ROWS * p.n; i++) room[i] = widened_one(kind, rows, i);
                rows_of_all_lanes(FLOAT32, TILE_ROWS, p, 0, room, m.scale, row);
            }
        }
    for (; row < last; row++) rows_of_all_lanes(kind, 1, p, 0, w + row * bytes, m.scale, row);
}

/* A thread's share of the rows. */
static void product(int64_t kind, Matrix m, int64_t rows, Product p, float *room) {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t first = rows * thread / threads, last = rows * (thread + 1) / threads;
    if (kind == FLOAT32) product_of(FLOAT32, p, m, first, last, room);
    else if (kind == BFLOAT16) product_of(BFLOAT16, p, m, first, last, room);
    else product_of(INT8, p, m, first, last, room);
}

/* ---- Norms and attention ------------------------------------------------------------------------------------------ */

static void norm(const float *x, const float *weight, float *out, int64_t B, int D) {
    for (int64_t lane = 0; lane < B; lane++, x += D, out += D) {
        const float factor = 1 / sqrtf(dot(x, x, D) / D + EPSILON);
        for (int i = 0; i < D; i++) out[i] = x[i] * factor * weight[i];
    }
}

static void unit_length(float *x, int K, float scale) {
    const float factor = scale / sqrtf(dot(x, x, K) + EPSILON);
    for (int i = 0; i < K; i++) x[i] *= factor;
}

/* out[0 .. vectors) = sum of p[j] * values[j], `vectors` of them from column `k` on. */
INLINE void weighted(const int kind, const int vectors, const float *p, const void *values, int count, int K, int k,
                     float *out) {
    vector sum[8] = {{0}};
    for (int64_t j = 0; j < count; j++) {
        const char *from = (const char *)values + (j * K + k) * size_of(kind);
#pragma GCC unroll 8
        for (int i = 0; i < vectors; i++) sum[i] += p[j] * widened(kind, from, i * LANES);
    }
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++) *(vector *)(out + k + i * LANES) = sum[i];
}

INLINE void attend_of(const int kind, const float *q, const void *keys, const void *values, const float *bias,
                      int count, int K, float *row, float *out) {
    int j = 0, k = 0;
    for (; j < count; j += 4) {
        float sums[16];
        const void *four = (const char *)keys + (int64_t)j * K * size_of(kind);
        const int there = smaller(4, count - j);
        if (there == 4) tile(kind, 4, 1, 0, four, K, q, K, sums);
        else
            for (int i = 0; i < there; i++)
                tile(kind, 1, 1, 0, (const char *)four + (int64_t)i * K * size_of(kind), K, q, K, sums + 4 * i);
        for (int i = 0; i < there; i++) row[j + i] = sums[4 * i] + (bias ? bias[j + i] : 0);
    }
    const int padded = rounded_up(count, LANES);
    for (j = count; j < padded; j++) row[j] = -INFINITY;
    vector most = *(vector *)row, total = {0};
    for (j = LANES; j < padded; j += LANES) most = choose(*(vector *)(row + j) > most, *(vector *)(row + j), most);
    const float highest = largest_of(most);
    for (j = 0; j < padded; j += LANES) total += *(vector *)(row + j) = exp_of(*(vector *)(row + j) - highest);
    for (; k + 8 * LANES <= K; k += 8 * LANES) weighted(kind, 8, row, values, count, K, k, out);
    for (; k + 4 * LANES <= K; k += 4 * LANES) weighted(kind, 4, row, values, count, K, k, out);
    for (; k + LANES <= K; k += LANES) weighted(kind, 1, row, values, count, K, k, out);
    for (; k < K; k++) {
        out[k] = 0;
        for (j = 0; j < count; j++) out[k] += row[j] * widened_one(kind, values, (int64_t)j * K + k);
    }
    const float factor = 1 / sum_of(total);
    for (k = 0; k < K; k++) out[k] *= factor;
}

static void attend(int64_t kind, const float *q, const void *keys, const void *values, const float *bias, int count,
                   int K, float *row, float *out) {
    if (kind == FLOAT32) attend_of(FLOAT32, q, keys, values, bias, count, K, row, out);
    else attend_of(BFLOAT16, q, keys, values, bias, count, K, row, out);
}

/* A head of a lane: over the window, or over what the state shows. */
static void attend_to_window(const Model *m, const Layer *layer, const Lane *lane, int head, float *joint, float *out,
                             float *row) {
    const int64_t HK = m->H * m->K, bytes = m->K * size_of(m->cache_kind);
    float *v = joint + head * m->K, *k = v + HK, *q = k + HK;
    const Store store = lane->store[layer->store];
    char *keys = (char *)store.data + (2 * layer->index * store.step + head * store.capacity + store.end) * bytes;
    char *values = keys + store.step * bytes;
    unit_length(k, m->K, 1);
    unit_length(q, m->K, layer->scale[head]);
    attend(m->cache_kind, q, keys - m->W * bytes, values - m->W * bytes, layer->bias + head * m->W, m->W, m->K, row,
           out);
    narrow(m->cache_kind, k, keys, m->K);
    narrow(m->cache_kind, v, values, m->K);
}

static void attend_to_state(const Model *m, const Layer *layer, const Lane *lane, int head, float *joint, float *out,
                            float *row) {
    float *q = joint + (3 * m->H + head) * m->K;
    const float *keys = lane->views + (4 * layer->view * m->H + head) * m->S * m->K;
    unit_length(q, m->K, layer->state_scale[head]);
    attend(FLOAT32, q, keys, keys + m->H * m->S * m->K, 0, m->S, m->K, row, out);
}

/* ---- Threads ------------------------------------------------------------------------------------------------------ */

typedef struct {
    atomic_int arrived, round;
} Barrier;

/* OpenMP's own barrier spins for milliseconds. Where two threads have to share a core, because others are busy on the
   machine, each would wait for the other's time slice to end; so a thread gives way after a moment. */
static void meet(Barrier *barrier, int team) {
    const int round = atomic_load(&barrier->round);
    if (atomic_fetch_add(&barrier->arrived, 1) + 1 == team) {
        atomic_store(&barrier->arrived, 0);
        atomic_store(&barrier->round, round + 1);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&barrier->round, memory_order_acquire) == round; spins++)
        if (spins < SPINS) _mm_pause();
        else sched_yield();
}

/* ---- The stack ---------------------------------------------------------------------------------------------------- */

/* Numbers that a call needs: for all threads, and for each. */
static int64_t shared_room(const Model *m, int64_t B) { return B * (m->D + 6 * m->H * m->K + m->F) + 64; }

static int64_t own_room(const Model *m, int64_t B) {
    const int64_t longest = larger(larger(m->D, m->F), 2 * m->H * m->K);
    return (B * m->D + larger(larger(m->W, m->S) + LANES, TILE_ROWS * longest) + 63) / 16 * 16;
}

int64_t decode_room(const Model *m, int64_t B, int64_t threads) {
    return shared_room(m, B) + threads * own_room(m, B);
}

/* logits (B, V), float32. room: as many numbers as `decode_room` says. */
void decode(const Model *m, const Lane *lanes, int64_t B, float *logits, float *room, int64_t threads) {
    const int64_t D = m->D, H = m->H, HK = H * m->K;
    float *x = room, *joint = x + B * D, *attended = joint + B * 4 * HK, *hidden = attended + B * 2 * HK;
    float *rooms = room + (shared_room(m, B) + 15) / 16 * 16 - 16;
    for (int64_t lane = 0; lane < B; lane++)
        memcpy(x + lane * D, m->embedding + lanes[lane].token * D, D * sizeof(float));
    Barrier barrier = {0, 0};
#pragma omp parallel num_threads(threads)
    {
        const int64_t team = omp_get_num_threads(), thread = omp_get_thread_num();
        float *normed = rooms + thread * own_room(m, B), *own = normed + B * D;
        for (int i = 0; i < m->layers; i++) {
            const Layer *layer = m->layer + i;
            const int64_t parts = layer->view < 0 ? 1 : 2, units = B * H * parts;
            norm(x, layer->attention_norm, normed, B, D);
            product(m->kind, layer->joint, (2 + parts) * HK, (Product){normed, joint, D, 4 * HK, B, STORE}, own);
            meet(&barrier, team);
            for (int64_t unit = units * thread / team; unit < units * (thread + 1) / team; unit++) {
                const int64_t lane = unit / (H * parts), head = unit % H, to_state = unit / H % parts;
                float *out = attended + (lane * parts + to_state) * HK + head * m->K;
                (to_state ? attend_to_state : attend_to_window)(m, layer, lanes + lane, head, joint + lane * 4 * HK,
                                                                out, own);
            }
            meet(&barrier, team);
            product(m->kind, layer->project, D, (Product){attended, x, parts * HK, D, B, ADD}, own);
            meet(&barrier, team);
            norm(x, layer->mlp_norm, normed, B, D);
            product(m->kind, layer->hidden, m->F, (Product){normed, hidden, D, m->F, B, RELU}, own);
            meet(&barrier, team);
            product(m->kind, layer->output, D, (Product){hidden, x, m->F, D, B, ADD}, own);
            meet(&barrier, team);
        }
        norm(x, m->final_norm, normed, B, D);
        product(m->kind, m->table, m->V, (Product){normed, logits, D, m->V, B, STORE}, own);
    }
}
