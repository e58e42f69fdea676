/* Decoding: one token of each of B lanes through the whole stack, in one call.

   The run time is that of reading weights and caches from memory once, which determines the design. Weights are stored by
   rows, each thread reads its share of the rows, and narrow weights are widened in registers. With several lanes, a tile
   of a few rows and 4 lanes is summed in registers, so that a weight is read once for all of them; the next rows are
   prefetched in small parts meanwhile, so that memory and arithmetic overlap. The order of each sum does not depend on the
   number of lanes: a lane has the same bits alone and in a batch. With many lanes, most of what a token reads are caches,
   so they have 24 bits per number, or 16 if the weights are narrow too, with a scale for each entry of a head.

   One parallel region; threads synchronize five times per layer. Every lane has separate caches, at any address: a token
   is written after the W entries that it sees. D, H, K, F, W, S, V are as in docs/model.md.

   Compiled for AVX-512 and for AVX2; called from `block_recurrent.inference.native_decode`, which checks the arguments
   and lays out the structures below as 64-bit numbers. */

#include <omp.h>
#include <sched.h>
#include <stdatomic.h>

#include "vectors.h"

#ifdef __AVX512F__
#define TILE_ROWS 6 /* 6 x 4 sums, 4 inputs and 1 weight of 32 registers */
#else
#define TILE_ROWS 3 /* 3 x 4 sums, 3 weights and 1 input fill the 16 registers of AVX2 */
#endif
#define TILE_LANES 4
#define AHEAD 4096 /* distance of prefetching, in bytes */
#define SPINS 1000 /* of a waiting thread: tens of microseconds */
#define EPSILON 1e-6f
#define SMALLEST 1e-30f /* largest number of an entry below which the entry is 0 */

enum { FLOAT32, BFLOAT16, INT8 };
enum { INT16, INT24 };
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

/* Entries of a cache, K numbers each: (high * 256 + low) * scale with 24 bits, high * scale with 16. */
typedef struct {
    int16_t *high;
    uint8_t *low;
    float *scales; /* of each entry */
} Numbers;

/* Caches of some layers: (layers, keys and values, H, capacity, K) of one lane. */
typedef struct {
    Numbers numbers;
    int64_t step;     /* entries from keys to values, and from layer to layer by two */
    int64_t capacity; /* from head to head */
    int64_t end;      /* the position that the token is written to */
} Store;

typedef struct {
    int64_t token;
    Store store[2];
    Numbers view;   /* (states, keys and values, H, S, K): keys and values of the states */
    int64_t filled; /* number of newest entries; earlier ones are 0, as near the beginning of a document */
} Lane;

/* ---- Reduced precision ------------------------------------------------------------------------------------------- */

typedef union {
    float number;
    uint32_t bits;
} Bits;

INLINE int64_t size_of(const int kind) { return kind == FLOAT32 ? 4 : kind == INT8 ? 1 : 2; }

/* LANES numbers, starting at the i-th. */
INLINE vector widened(const int kind, const void *from, int64_t i) {
    const void *at = (const char *)from + i * size_of(kind);
    if (kind == FLOAT32) return *(const vector *)at;
#ifdef __AVX512F__
    if (kind == INT8) return (vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at)));
    const __m256i half = _mm256_loadu_si256(at);
    return (vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#else
    if (kind == INT8) return (vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(at)));
    const __m128i half = _mm_loadu_si128(at);
    return (vector)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
#endif
}

INLINE float widened_one(const int kind, const void *from, int64_t i) {
    if (kind == FLOAT32) return ((const float *)from)[i];
    if (kind == INT8) return ((const int8_t *)from)[i];
    return (Bits){.bits = (uint32_t)((const uint16_t *)from)[i] << 16}.number;
}

/* Of an entry of a cache, without its scale. */
INLINE vector cached(const int kind, Numbers from, int64_t i) {
#ifdef __AVX512F__
    __m512i number = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)(from.high + i)));
    if (kind == INT24) {
        const __m512i low = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(from.low + i)));
        number = _mm512_or_si512(_mm512_slli_epi32(number, 8), low);
    }
    return (vector)_mm512_cvtepi32_ps(number);
#else
    __m256i number = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)(from.high + i)));
    if (kind == INT24) {
        const __m256i low = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(from.low + i)));
        number = _mm256_or_si256(_mm256_slli_epi32(number, 8), low);
    }
    return (vector)_mm256_cvtepi32_ps(number);
#endif
}

INLINE float cached_one(const int kind, Numbers from, int64_t i) {
    return kind == INT24 ? from.high[i] * 256 + from.low[i] : from.high[i];
}

INLINE Numbers entry(const int kind, Numbers from, int64_t i, int K) {
    return (Numbers){from.high + i * K, kind == INT24 ? from.low + i * K : 0, from.scales + i};
}

INLINE void fetch_entry(const int kind, Numbers at, int K) {
    for (int i = 0; i < 2 * K; i += 64) __builtin_prefetch((const char *)at.high + AHEAD + i);
    if (kind == INT24)
        for (int i = 0; i < K; i += 64) __builtin_prefetch((const char *)at.low + AHEAD / 2 + i);
}

/* Writes K numbers as an entry of a cache. The scale is a power of two, so that widening and narrowing an entry restores
   the same numbers: a memory that was saved and loaded continues exactly like the original. */
INLINE void narrow(const int kind, const float *x, Numbers to, int K) {
    const int bits = kind == INT24 ? 23 : 15;
    const float largest = (1 << bits) - 1;
    vector highest = {0}, sound = {0};
    int i = 0;
    for (; i + LANES <= K; i += LANES) {
        const vector at = *(const vector *)(x + i), size = (vector)((integers)at & 0x7fffffff);
        highest = choose(size > highest, size, highest), sound += at * 0;
    }
    Bits most = {largest_of(highest)};
    float all_sound = sum_of(sound);
    for (; i < K; i++) most.number = fabsf(x[i]) > most.number ? fabsf(x[i]) : most.number, all_sound += x[i] * 0;
    if (most.number < SMALLEST) most.number = 1; /* all are rounded to 0 */
    const uint32_t exponent = most.bits >> 23;
    const Bits scale = {.bits = (exponent + 1 - bits) << 23}, factor = {.bits = (253 + bits - exponent) << 23};
    *to.scales = scale.number + all_sound; /* propagates NaN and infinity */
    for (i = 0; i < K; i++) {
        float number = rintf(x[i] * factor.number);
        number = number > largest ? largest : number < -largest ? -largest : number;
        const int whole = all_sound == 0 ? (int)number : 0;
        to.high[i] = kind == INT24 ? whole >> 8 : whole;
        if (kind == INT24) to.low[i] = whole;
    }
}

INLINE int is_zero(const float *x, int K) {
    int filled = 0;
    for (int i = 0; i < K; i++) filled |= x[i] != 0;
    return !filled;
}

/* Narrows the entries of several heads. `to` is zeroed, with `capacity` entries per head; entries before `first` are known
   to be 0. Returns the first entry that is not. */
int64_t decode_narrow(int64_t kind, const float *x, const Numbers *to, int64_t heads, int64_t first, int64_t entries,
                      int64_t capacity, int64_t K, int64_t threads) {
    int64_t filled = entries;
#pragma omp parallel for num_threads(threads) reduction(min : filled)
    for (int64_t head = 0; head < heads; head++) {
        int64_t i = first;
        while (i < entries && is_zero(x + (head * entries + i) * K, K)) i++;
        filled = smaller(filled, i);
        for (; i < entries; i++) {
            const float *from = x + (head * entries + i) * K;
            if (kind == INT24) narrow(INT24, from, entry(INT24, *to, head * capacity + i, K), K);
            else narrow(INT16, from, entry(INT16, *to, head * capacity + i, K), K);
        }
    }
    return filled;
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

/* What to prefetch during other computations: `step` bytes at a time. */
typedef struct {
    const char *next;
    int64_t step;
} Ahead;

/* Into the second-level cache: the inputs of the lanes fill the first. */
INLINE void fetch(Ahead *ahead) {
    for (int64_t i = 0; i < ahead->step; i += 64) __builtin_prefetch(ahead->next + i, 0, 2);
    ahead->next += ahead->step;
}

/* sums[row] = w[row] . x, for at most 4 rows of n numbers side by side. far: distance of prefetching in bytes, or 0.
   The processor does not recognize the pattern of rows that are read side by side. */
INLINE void four_rows(const int kind, const int rows, int64_t far, const void *w, int64_t n, const float *x,
                      float *sums) {
    vector sum[4] = {{0}};
    int64_t k = 0;
    for (; k + LANES <= n; k += LANES) {
        if (far)
#pragma GCC unroll 4
            for (int i = 0; i < rows * LANES * size_of(kind); i += 64)
                __builtin_prefetch((const char *)w + far + k * rows * size_of(kind) + i);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) sum[r] += widened(kind, w, r * n + k) * *(const vector *)(x + k);
    }
    float side_by_side[4];
    _mm_storeu_ps(side_by_side, sums_of(sum));
    for (int r = 0; r < rows; r++) {
        sums[r] = side_by_side[r];
        for (int64_t i = k; i < n; i++) sums[r] = fmaf(widened_one(kind, w, r * n + i), x[i], sums[r]);
    }
}

/* sums[row * 4 + lane] = w[row] . x[lane], for at most TILE_ROWS rows and 4 lanes. */
INLINE void tile(const int kind, const int rows, const int lanes, Ahead *ahead, const void *w, int64_t n,
                 const float *x, float *sums) {
    vector sum[TILE_ROWS][4] = {{{0}}};
    int64_t k = 0;
    for (; k + LANES <= n; k += LANES) {
        vector input[4];
        if (ahead) fetch(ahead);
#pragma GCC unroll 4
        for (int l = 0; l < lanes; l++) input[l] = *(const vector *)(x + l * n + k);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const vector weight = widened(kind, w, r * n + k);
#pragma GCC unroll 4
            for (int l = 0; l < lanes; l++) sum[r][l] += weight * input[l];
        }
    }
    for (int r = 0; r < rows; r++) _mm_storeu_ps(sums + r * 4, sums_of(sum[r]));
    for (; k < n; k++)
        for (int r = 0; r < rows; r++)
            for (int l = 0; l < lanes; l++)
                sums[r * 4 + l] = fmaf(widened_one(kind, w, r * n + k), x[l * n + k], sums[r * 4 + l]);
}

typedef struct {
    const float *x; /* (B, n) */
    float *out;     /* (B, out_row) */
    int64_t n, out_row, B;
    int what; /* what to do with the sums */
} Product;

/* Without a branch, which would be mispredicted for half of the numbers. NaN stays NaN. */
INLINE float relu(float x) { return _mm_cvtss_f32(_mm_max_ss(_mm_setzero_ps(), _mm_set_ss(x))); }

INLINE void finish(Product p, const float *sums, const float *scale, int64_t row, int rows, int64_t lane, int lanes) {
    for (int l = 0; l < lanes; l++)
        for (int r = 0; r < rows; r++) {
            float *to = p.out + (lane + l) * p.out_row + row + r, sum = sums[r * 4 + l];
            if (scale) sum *= scale[row + r];
            *to = p.what == ADD ? *to + sum : p.what == RELU ? relu(sum) : sum;
        }
}

INLINE void rows_of_all_lanes(const int kind, const int rows, Product p, Ahead *ahead, const void *w,
                              const float *scale, int64_t row) {
    float sums[4 * TILE_ROWS];
    for (int64_t lane = 0; lane < p.B; lane += TILE_LANES) {
        const int lanes = smaller(TILE_LANES, p.B - lane);
        const float *x = p.x + lane * p.n;
        if (lanes == 4) tile(kind, rows, 4, ahead, w, p.n, x, sums);
        else if (lanes == 3) tile(kind, rows, 3, ahead, w, p.n, x, sums);
        else if (lanes == 2) tile(kind, rows, 2, ahead, w, p.n, x, sums);
        else tile(kind, rows, 1, ahead, w, p.n, x, sums);
        finish(p, sums, scale, row, rows, lane, lanes);
    }
}

/* Rows first to last of a matrix of one kind, for one lane. */
INLINE void product_of_one(const int kind, Product p, Matrix m, int64_t first, int64_t last) {
    const int64_t bytes = p.n * size_of(kind), four = 4 * bytes;
    const int64_t far = (AHEAD + four - 1) / four * four;
    const char *w = (const char *)m.weight;
    float sums[16];
    for (int64_t row = first; row < last; row += 4) {
        const int rows = smaller(4, last - row);
        if (rows == 4) four_rows(kind, 4, far, w + row * bytes, p.n, p.x, sums);
        else
            for (int r = 0; r < rows; r++) four_rows(kind, 1, 0, w + (row + r) * bytes, p.n, p.x, sums + r);
        for (int r = rows - 1; r >= 0; r--) sums[4 * r] = sums[r];
        finish(p, sums, m.scale, row, rows, 0, 1);
    }
}

/* The same for several lanes. Narrow weights are widened once for all lanes, into `room`. */
INLINE void product_of(const int kind, Product p, Matrix m, int64_t first, int64_t last, float *room) {
    int64_t row = first;
    const int64_t bytes = p.n * size_of(kind), group = TILE_ROWS * bytes;
    /* The next rows are prefetched in equal parts, for every LANES columns of every tile. */
    const int64_t parts = larger(1, p.n / LANES) * ((p.B + TILE_LANES - 1) / TILE_LANES);
    for (; row + TILE_ROWS <= last; row += TILE_ROWS) {
        const char *rows = (const char *)m.weight + row * bytes;
        Ahead ahead = {rows + group, (group + parts - 1) / parts};
        if (kind == FLOAT32 || p.B <= TILE_LANES) rows_of_all_lanes(kind, TILE_ROWS, p, &ahead, rows, m.scale, row);
        else {
            int64_t i = 0;
            for (; i + LANES <= TILE_ROWS * p.n; i += LANES) *(vector *)(room + i) = widened(kind, rows, i);
            for (; i < TILE_ROWS * p.n; i++) room[i] = widened_one(kind, rows, i);
            rows_of_all_lanes(FLOAT32, TILE_ROWS, p, &ahead, room, m.scale, row);
        }
    }
    for (; row < last; row++) rows_of_all_lanes(kind, 1, p, 0, (const char *)m.weight + row * bytes, m.scale, row);
}

/* A thread's share of the rows. */
static void product(int64_t kind, Matrix m, int64_t rows, Product p, float *room) {
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
    const int64_t first = rows * thread / threads, last = rows * (thread + 1) / threads;
    if (p.B == 1 && kind == FLOAT32) product_of_one(FLOAT32, p, m, first, last);
    else if (p.B == 1 && kind == BFLOAT16) product_of_one(BFLOAT16, p, m, first, last);
    else if (p.B == 1) product_of_one(INT8, p, m, first, last);
    else if (kind == FLOAT32) product_of(FLOAT32, p, m, first, last, room);
    else if (kind == BFLOAT16) product_of(BFLOAT16, p, m, first, last, room);
    else product_of(INT8, p, m, first, last, room);
}

/* ---- Norms and attention ----------------------------------------------------------------------------------------- */

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

/* scores[row] = keys[row] . q, for at most 4 keys. */
INLINE void scores_of(const int kind, const int rows, Numbers keys, int K, const float *q, float *scores) {
    vector sum[4] = {{0}};
    int k = 0;
    for (; k + LANES <= K; k += LANES)
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) sum[r] += cached(kind, keys, r * K + k) * *(const vector *)(q + k);
    float side_by_side[4];
    _mm_storeu_ps(side_by_side, sums_of(sum));
    for (int r = 0; r < rows; r++) {
        fetch_entry(kind, entry(kind, keys, r, K), K);
        for (int i = k; i < K; i++) side_by_side[r] += cached_one(kind, keys, r * K + i) * q[i];
        scores[r] = side_by_side[r] * keys.scales[r];
    }
}

/* out[0 .. vectors) = sum of p[j] * values[j], for `vectors` vectors starting at column `k`. */
INLINE void weighted(const int kind, const int vectors, const float *p, Numbers values, int count, int K, int k,
                     float *out) {
    vector sum[8] = {{0}};
    for (int64_t j = 0; j < count; j++) {
        if (k == 0) fetch_entry(kind, entry(kind, values, j, K), K);
#pragma GCC unroll 8
        for (int i = 0; i < vectors; i++) sum[i] += p[j] * cached(kind, values, j * K + k + i * LANES);
    }
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++) *(vector *)(out + k + i * LANES) = sum[i];
}

/* Entries before `first` are 0: their scores equal the bias, and their values add nothing. */
INLINE void attend_of(const int kind, const float *q, Numbers keys, Numbers values, const float *bias, int first,
                      int count, int K, float *row, float *out) {
    const int padded = rounded_up(count, LANES);
    int j = first, k = 0;
    for (int i = 0; i < first; i++) row[i] = 0;
    for (; j + 4 <= count; j += 4) scores_of(kind, 4, entry(kind, keys, j, K), K, q, row + j);
    for (; j < count; j++) scores_of(kind, 1, entry(kind, keys, j, K), K, q, row + j);
    for (j = 0; bias && j < count; j++) row[j] += bias[j];
    for (j = count; j < padded; j++) row[j] = -INFINITY;
    vector most = *(vector *)row, total = {0};
    for (j = LANES; j < padded; j += LANES) most = choose(*(vector *)(row + j) > most, *(vector *)(row + j), most);
    const float highest = largest_of(most);
    for (j = 0; j < padded; j += LANES) total += *(vector *)(row + j) = exp_of(*(vector *)(row + j) - highest);
    const float factor = 1 / sum_of(total);
    for (j = first; j < count; j++) row[j] *= factor * values.scales[j];
    const Numbers read = entry(kind, values, first, K);
    const int left = count - first;
    for (; k + 8 * LANES <= K; k += 8 * LANES) weighted(kind, 8, row + first, read, left, K, k, out);
    for (; k + 4 * LANES <= K; k += 4 * LANES) weighted(kind, 4, row + first, read, left, K, k, out);
    for (; k + LANES <= K; k += LANES) weighted(kind, 1, row + first, read, left, K, k, out);
    for (; k < K; k++) {
        out[k] = 0;
        for (j = first; j < count; j++) out[k] += row[j] * cached_one(kind, values, (int64_t)j * K + k);
    }
}

static void attend(int64_t kind, const float *q, Numbers keys, Numbers values, const float *bias, int first, int count,
                   int K, float *row, float *out) {
    if (kind == INT24) attend_of(INT24, q, keys, values, bias, first, count, K, row, out);
    else attend_of(INT16, q, keys, values, bias, first, count, K, row, out);
}

/* A head of a lane: over the window, or over the keys and values of the state. */
static void attend_to_window(const Model *m, const Layer *layer, const Lane *lane, int head, float *joint, float *out,
                             float *row) {
    const int64_t HK = m->H * m->K, K = m->K, W = m->W;
    float *v = joint + head * K, *k = v + HK, *q = k + HK;
    const Store store = lane->store[layer->store];
    const int64_t at = 2 * layer->index * store.step + head * store.capacity + store.end;
    const Numbers key = entry(m->cache_kind, store.numbers, at, K);
    const Numbers value = entry(m->cache_kind, store.numbers, at + store.step, K);
    unit_length(k, K, 1);
    unit_length(q, K, layer->scale[head]);
    attend(m->cache_kind, q, entry(m->cache_kind, key, -W, K), entry(m->cache_kind, value, -W, K),
           layer->bias + head * W, larger(0, W - lane->filled) / 4 * 4, W, K, row, out);
    if (m->cache_kind == INT24) narrow(INT24, k, key, K), narrow(INT24, v, value, K);
    else narrow(INT16, k, key, K), narrow(INT16, v, value, K);
}

static void attend_to_state(const Model *m, const Layer *layer, const Lane *lane, int head, float *joint, float *out,
                            float *row) {
    float *q = joint + (3 * m->H + head) * m->K;
    const Numbers keys = entry(m->cache_kind, lane->view, (2 * layer->view * m->H + head) * m->S, m->K);
    unit_length(q, m->K, layer->state_scale[head]);
    attend(m->cache_kind, q, keys, entry(m->cache_kind, keys, m->H * m->S, m->K), 0, 0, m->S, m->K,
           row, out);
}

/* ---- Threads ----------------------------------------------------------------------------------------------------- */

typedef struct {
    atomic_int arrived, round;
} Barrier;

/* OpenMP's barrier spins for milliseconds. If two threads share a core because the machine is busy, each would wait for
   the other's time slice to end; so a thread yields after a short time. */
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

/* ---- The stack --------------------------------------------------------------------------------------------------- */

/* Working memory of a call, in numbers: shared, and for each thread. */
static int64_t shared_room(const Model *m, int64_t B) { return B * (m->D + 6 * m->H * m->K + m->F) + 64; }

static int64_t own_room(const Model *m, int64_t B) {
    const int64_t longest = larger(larger(m->D, m->F), 2 * m->H * m->K);
    return (B * m->D + larger(larger(m->W, m->S) + LANES, TILE_ROWS * longest) + 63) / 16 * 16;
}

int64_t decode_room(const Model *m, int64_t B, int64_t threads) {
    return shared_room(m, B) + threads * own_room(m, B);
}

/* logits (B, V), float32. room: working memory of `decode_room` numbers. */
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
