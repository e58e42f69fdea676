/* Decoding: one token of each of B lanes through the whole stack, in one call.

   With few lanes the time is that of reading weights and caches from memory once, so everything here is about that:
   weights lie row after row, a thread reads the rows of its share, and a narrow weight is widened in registers. With
   many lanes a tile of some rows and 4 lanes is summed in registers, so that a weight read once serves all of them;
   what is read next is fetched little by little meanwhile, so that memory and arithmetic work at the same time.

   One parallel region; threads meet five times a layer. Every lane has caches of its own, wherever they are: a token is
   written behind the W entries that it sees. Letters as everywhere: D, H, K, F, W, S, V.

   Compiled for AVX-512 and for AVX2; called from `block_recurrent.inference.native_decode`, which checks what comes in
   and lays out the structures below as 64-bit numbers. */

#include <immintrin.h>
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
#define AHEAD 4096    /* bytes that are fetched before they are needed */
#define LONG_ROW 4096 /* bytes of a row that is read well without */
#define SPINS 1000 /* of a waiting thread: some tens of microseconds */
#define EPSILON 1e-6f
#define HIGHEST_FLOAT16 65504

enum { FLOAT32, BFLOAT16, INT8, FLOAT16 };
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

INLINE int64_t size_of(const int kind) { return kind == FLOAT32 ? 4 : kind == INT8 ? 1 : 2; }

/* LANES numbers from the i-th on. */
INLINE vector widened(const int kind, const void *from, int64_t i) {
    const void *at = (const char *)from + i * size_of(kind);
    if (kind == FLOAT32) return *(const vector *)at;
#ifdef __AVX512F__
    if (kind == INT8) return (vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at)));
    const __m256i half = _mm256_loadu_si256(at);
    if (kind == FLOAT16) return (vector)_mm512_cvtph_ps(half);
    return (vector)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#else
    if (kind == INT8) return (vector)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(at)));
    const __m128i half = _mm_loadu_si128(at);
    if (kind == FLOAT16) return (vector)_mm256_cvtph_ps(half);
    return (vector)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
#endif
}

INLINE float widened_one(const int kind, const void *from, int64_t i) {
    if (kind == FLOAT32) return ((const float *)from)[i];
    if (kind == INT8) return ((const int8_t *)from)[i];
    const uint16_t half = ((const uint16_t *)from)[i];
    if (kind == FLOAT16) return _cvtsh_ss(half);
    union {
        uint32_t bits;
        float number;
    } x = {(uint32_t)half << 16};
    return x.number;
}

/* Of a cache: float32, or float16 rounded to the nearest, of two the even one; what is too large becomes the largest. */
INLINE void narrow(const int kind, const float *from, void *to, int n) {
    if (kind == FLOAT32) memcpy(to, from, n * sizeof(float));
    else
        for (int i = 0; i < n; i++) {
            const float x = from[i] > HIGHEST_FLOAT16 ? HIGHEST_FLOAT16 : from[i];
            ((uint16_t *)to)[i] = _cvtss_sh(x < -HIGHEST_FLOAT16 ? -HIGHEST_FLOAT16 : x, 0);
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

/* What is to be fetched while something else is computed: `step` bytes at a time. */
typedef struct {
    const char *next;
    int64_t step;
} Ahead;

INLINE void fetch(Ahead *ahead) {
    for (int64_t i = 0; i < ahead->step; i += 64) __builtin_prefetch(ahead->next + i);
    ahead->next += ahead->step;
}

/* sums[row] = w[row] . x, for at most 4 rows of n numbers side by side. far: bytes to what is fetched meanwhile, or 0.
   Short rows that are read side by side are no pattern that the processor would see through. */
INLINE void four_rows(const int kind, const int rows, int64_t far, const void *w, int64_t n, const float *x,
                      float *sums) {
    vector sum[4][2] = {{{0}}}, both[4];
    int64_t k = 0;
    for (; k + 2 * LANES <= n; k += 2 * LANES) {
        if (far)
#pragma GCC unroll 8
            for (int i = 0; i < rows * 2 * LANES * size_of(kind); i += 64)
                __builtin_prefetch((const char *)w + far + k * rows * size_of(kind) + i);
#pragma GCC unroll 2
        for (int c = 0; c < 2; c++)
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
                sum[r][c] += widened(kind, w, r * n + k + c * LANES) * *(const vector *)(x + k + c * LANES);
    }
    for (int r = 0; r < 4; r++) both[r] = sum[r][0] + sum[r][1];
    float side_by_side[4];
    _mm_storeu_ps(side_by_side, sums_of(both));
    for (int r = 0; r < rows; r++) {
        sums[r] = side_by_side[r];
        for (int64_t i = k; i < n; i++) sums[r] += widened_one(kind, w, r * n + i) * x[i];
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
            for (int l = 0; l < lanes; l++) sums[r * 4 + l] += widened_one(kind, w, r * n + k) * x[l * n + k];
}

typedef struct {
    const float *x; /* (B, n) */
    float *out;     /* (B, out_row) */
    int64_t n, out_row, B;
    int what; /* to do with the sums */
} Product;

INLINE void finish(Product p, const float *sums, const float *scale, int64_t row, int rows, int64_t lane, int lanes) {
    for (int l = 0; l < lanes; l++)
        for (int r = 0; r < rows; r++) {
            float *to = p.out + (lane + l) * p.out_row + row + r, sum = sums[r * 4 + l];
            if (scale) sum *= scale[row + r];
            *to = p.what == ADD ? *to + sum : p.what == RELU && !(sum > 0) ? sum * 0 : sum;
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

/* Rows from first to last of a matrix of one kind, for one lane. */
INLINE void product_of_one(const int kind, Product p, Matrix m, int64_t first, int64_t last) {
    const int64_t bytes = p.n * size_of(kind), four = 4 * bytes;
    const int64_t far = bytes >= LONG_ROW ? 0 : (AHEAD + four - 1) / four * four;
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
    /* The next rows are fetched in equal parts, with every LANES columns of every tile. */
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
        const char *four = (const char *)keys + (int64_t)j * K * size_of(kind);
        const int there = smaller(4, count - j);
        if (there == 4) four_rows(kind, 4, AHEAD, four, K, q, row + j);
        else
            for (int i = 0; i < there; i++) four_rows(kind, 1, 0, four + i * K * size_of(kind), K, q, row + j + i);
    }
    for (j = 0; bias && j < count; j++) row[j] += bias[j];
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
    else attend_of(FLOAT16, q, keys, values, bias, count, K, row, out);
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
