/* Attention on a CPU, forward and backward: over a sliding window with a learned bias by distance, or over all keys.

   Query i of a head sees W keys, starting at key i * slide, with logits q[i].k[j] + bias[j - i * slide]. With slide 1 this
   is the sliding window (the first W keys are those of the preceding tokens); with slide 0 all queries see all keys.

   There may be several groups of N queries, one after the other, each with separate keys, and the keys of a group may be
   several tensors of equal length, one after the other, so that the caller does not have to concatenate them.

   Heads of groups of lanes ("pairs") are independent. The keys of a pair are cut into blocks of KEYS, its queries into tiles of
   TILE. A block is packed into the layout of the products and then used by all tiles that see part of it. A block, the
   gradients of its keys and values, and the logits and weights of a tile thus stay in the second-level cache for any
   window length: nothing of size N x W goes through memory. Since no tile sees all of its keys at once, softmax is
   computed online (forward), and recomputed from the logarithm of its sum (backward).

   N, W, K are as in docs/model.md. Compiled for AVX-512 and for AVX2; called from `attention.py` in this folder. */

#include <omp.h>

#include "vectors.h"

#define TILE 48  /* queries of a tile: a multiple of ROWS and LANES */
#define KEYS 240 /* of a block: a multiple of TILE and PANEL */
#define SIDE 32  /* numbers of minus infinity on both sides of a bias, at least ROWS + LANES */

typedef struct {
    int B, H, N, K, W;
    int slide;
    int groups, pieces; /* tensors of keys: pieces of group 0, of group 1, ... */
    int fixed_keys; /* number of leading keys that need no gradients */
    float dropout;
    uint64_t seed; /* of the dropout mask, which is never stored: the backward pass regenerates it */
    int threads;
} Shape;

static int pairs_of(Shape s) { return s.B * s.groups * s.H; }

static float *rows_of(Tensor x, Shape s, int pair, int row) {
    const int head = pair % s.H, group = pair / s.H % s.groups, lane = pair / s.H / s.groups;
    return x.data + lane * x.lane + head * x.head + (group * s.N + row) * x.row;
}

static int keys_of(Shape s, int queries) { return s.W + queries * s.slide; }

/* Consecutive rows, starting at `data`: key `key` and those after it. */
typedef struct {
    float *data;
    int64_t row;
    int count;
} Rows;

/* Keys (or values) of a pair, starting at `key`: at most `most`, and not beyond their piece. */
static Rows keys_from(const Tensor *x, Shape s, int pair, int key, int most) {
    const int head = pair % s.H, group = pair / s.H % s.groups, lane = pair / s.H / s.groups;
    const int length = keys_of(s, s.N) / s.pieces;
    const Tensor piece = x[group * s.pieces + key / length];
    float *data = piece.data + lane * piece.lane + head * piece.head + key % length * piece.row;
    return (Rows){data, piece.row, smaller(most, length - key % length)};
}

/* The bias of a head: a row of W numbers and the sides; without a slide, one row for all heads. */
static int64_t bias_row(Shape s) { return s.W + 2 * SIDE; }

static float *bias_of(float *bias, Shape s, int head) { return bias + s.slide * head * bias_row(s) + SIDE; }

/* Without a slide there is no bias; it only marks the end of the keys. */
static void no_bias(float *bias, Shape s) {
    for (int j = 0; j < bias_row(s); j++) bias[j] = j >= SIDE && j < SIDE + s.W ? 0 : -INFINITY;
}

/* ---- Overlap of tiles and blocks --------------------------------------------------------------------------------- */

/* The columns of a block that ROWS queries see, in whole vectors: from `first` to before `end`. */
typedef struct {
    int first, end;
} Span;

/* For the queries starting at i, in the block that begins with key `start`. */
INLINE Span span_of(int i, int start, Shape s) {
    if (i >= s.N) return (Span){0, 0};
    int first = larger(0, i * s.slide - start), end = smaller(KEYS, (i + ROWS - 1) * s.slide + s.W - start);
    return (Span){first / LANES * LANES, rounded_up(end, LANES)};
}

static int meet(int tile, int start, Shape s) {
    return tile * s.slide < start + KEYS && (tile + TILE - 1) * s.slide + s.W > start;
}

/* ---- Products ---------------------------------------------------------------------------------------------------- */

/* The three kinds of products of a tile and a block. Parts that no query sees are skipped. */

/* out (TILE x KEYS) = x (TILE x K) times keys, in panels (K x PANEL): logits, or the gradient of weights. */
static void by_panels(const float *x, const float *panels, float *out, int tile, int start, Shape s, int width) {
    for (int column = 0; column < KEYS; column += PANEL, panels += PANEL * width)
        for (int i = 0; i < TILE; i += ROWS) {
            Span seen = span_of(tile + i, start, s);
            int first = larger(seen.first, column), vectors = (smaller(seen.end, column + PANEL) - first) / LANES;
            const float *a = x + i * width, *b = panels + first - column;
            float *c = out + i * KEYS + first;
            if (vectors == 3) block_of(3, a, width, 1, b, PANEL, c, KEYS, width, 0);
            else if (vectors == 2) block_of(2, a, width, 1, b, PANEL, c, KEYS, width, 0);
            else if (vectors == 1) block_of(1, a, width, 1, b, PANEL, c, KEYS, width, 0);
        }
}

/* out (TILE x K) += weights (TILE x KEYS) times values (KEYS x K). */
static void by_keys(const float *weights, const float *values, float *out, int tile, int start, Shape s, int width) {
    for (int i = 0; i < TILE; i += ROWS) {
        Span seen = span_of(tile + i, start, s);
        if (seen.first < seen.end)
            rows_times(weights + i * KEYS + seen.first, KEYS, 1, values + seen.first * width, width, out + i * width,
                       width, seen.end - seen.first, width, 1);
    }
}

/* out (KEYS x K) += weights' (KEYS x TILE) times x (TILE x K): the gradients of values and keys. */
static void by_queries(const float *weights, const float *x, float *out, int tile, int start, Shape s, int width) {
    const int rows = smaller(TILE, rounded_up(s.N - tile, ROWS));
    for (int column = 0; column < smaller(KEYS, keys_of(s, s.N) - start); column += ROWS) {
        int newest = start + column - tile; /* the newest query that sees the first of these keys */
        int first = s.slide ? larger(0, newest - s.W + 1) : 0, end = s.slide ? smaller(rows, newest + ROWS) : rows;
        if (first < end)
            rows_times(weights + first * KEYS + column, 1, KEYS, x + first * width, width, out + column * width, width,
                       end - first, width, 1);
    }
}

/* ---- Softmax and dropout of a row -------------------------------------------------------------------------------- */

/* Rows and biases begin at the first column of a block. The bias is minus infinity where a query does not attend. */

/* The seed of the mask of a query, by splitmix64. */
static uint32_t seed_of(Shape s, int pair, int i) {
    uint64_t x = s.seed + ((uint64_t)pair * s.N + i) * 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return (uint32_t)(x ^ x >> 31);
}

/* 0, or the inverse of the share that is kept, for the keys starting at `key`. */
INLINE vector mask_of(uint32_t seed, int key, float dropout) {
    naturals x;
    for (int i = 0; i < LANES; i++) x[i] = i;
    x = seed + (x + (uint32_t)key) * 0x9E3779B9u;
    x = (x ^ x >> 16) * 0x7FEB352Du;
    x = (x ^ x >> 15) * 0x846CA68Bu;
    const uint32_t below = (uint32_t)(dropout * 4294967296.0);
    return choose((x ^ x >> 16) < below, (vector){0}, (vector){0} + 1.0f / (1.0f - dropout));
}

/* The softmax of a query so far. */
typedef struct {
    float highest, sum;
} Softmax;

/* Logits -> exponentials relative to the highest logit so far, in place, and their sum. A new highest logit rescales
   the previous sum. */
static void weigh(float *row, const float *bias, Span seen, Softmax *softmax, float *result, int width) {
    vector most = (vector){0} - INFINITY, sum = {0};
    for (int j = seen.first; j < seen.end; j += LANES) {
        vector x = *(vector *)(row + j) + *(const vector *)(bias + j);
        *(vector *)(row + j) = x;
        most = choose(x > most, x, most);
    }
    const float highest = largest_of(most);
    if (highest > softmax->highest) {
        if (softmax->highest > -INFINITY) { /* there is a previous sum */
            const float factor = expf(softmax->highest - highest);
            for (int k = 0; k < width; k += LANES) *(vector *)(result + k) *= factor;
            softmax->sum *= factor;
        }
        softmax->highest = highest;
    }
    const float shift = softmax->highest > -INFINITY ? softmax->highest : 0; /* if none of the keys is this query's */
    for (int j = seen.first; j < seen.end; j += LANES)
        sum += *(vector *)(row + j) = exp_of(*(vector *)(row + j) - shift);
    softmax->sum += sum_of(sum);
}

static void drop(float *row, Span seen, int key, float dropout, uint32_t seed) {
    for (int j = seen.first; j < seen.end; j += LANES) *(vector *)(row + j) *= mask_of(seed, key + j, dropout);
}

/* Logits -> (dropped) weights, and gradients of those -> gradients of logits, both in place; adds to d_bias.
   `along`: the sum over all keys of weights times their gradients. */
INLINE void weigh_backward(float *row, float *d_row, const float *bias, float *d_bias, Span seen, float log_sum,
                           float along, int key, const float dropout, uint32_t seed) {
    for (int j = seen.first; j < seen.end; j += LANES) {
        vector weight = exp_of(*(vector *)(row + j) + *(const vector *)(bias + j) - log_sum);
        vector mask = (vector){0} + 1.0f;
        if (dropout > 0) mask = mask_of(seed, key + j, dropout);
        vector d_logit = weight * (*(vector *)(d_row + j) * mask - along);
        *(vector *)(row + j) = weight * mask;
        *(vector *)(d_row + j) = d_logit;
        *(vector *)(d_bias + j) += d_logit;
    }
}

/* ---- Layouts ----------------------------------------------------------------------------------------------------- */

/* Rows of a block with this number of keys: up to the last that ROWS queries see, in whole vectors. */
static int keys_laid(Shape s, int there) { return smaller(KEYS, rounded_up(there + ROWS * s.slide, LANES)); }

/* The keys starting at `start` -> laid x width, padded with zeros. */
static void lay_keys(const Tensor *x, Shape s, int pair, int start, int there, float *out, int laid, int width) {
    for (int j = 0; j < there;) {
        const Rows rows = keys_from(x, s, pair, start + j, there - j);
        lay_rows(rows.data, rows.row, rows.count, s.K, out + j * width, rows.count, width);
        j += rows.count;
    }
    memset(out + there * width, 0, (size_t)(laid - there) * width * sizeof(float));
}

/* The inverse of `lay_keys`, for gradients; zeros in the first rows. */
static void put_keys(const float *x, int width, const Tensor *out, Shape s, int pair, int start, int zeros, int there) {
    for (int j = 0; j < there;) {
        const Rows rows = keys_from(out, s, pair, start + j, there - j);
        for (int i = 0; i < rows.count; i++)
            if (j + i < zeros) memset(rows.data + i * rows.row, 0, s.K * sizeof(float));
            else copy_row(x + (j + i) * width, rows.data + i * rows.row, s.K);
        j += rows.count;
    }
}

/* ---- Functions called from Python -------------------------------------------------------------------------------- */

/* Queries of a task of the forward pass: more than the keys before them, so that few keys are packed twice. */
static int queries_of_task(Shape s) { return rounded_up(smaller(larger(2 * s.W, 4 * TILE), s.N), TILE); }

/* q (B, H, groups * N, K), k and v groups * pieces of (B, H, (W + N * slide) / pieces, K), bias (H, SIDE + W + SIDE) or
   none without a slide -> out (B, H, groups * N, K), log_sums (B * groups * H, N). */
int attention(Shape s, Tensor q, const Tensor *k, const Tensor *v, float *bias, Tensor out, float *log_sums) {
    const int width = rounded_up(s.K, LANES), most = queries_of_task(s), tasks = (s.N + most - 1) / most;
    const size_t block = KEYS * width, all = (size_t)most * width;
    const size_t each = 2 * bytes_of(block) + bytes_of(TILE * KEYS) + 2 * bytes_of(all) + bytes_of(2 * most);
    char *working = room(each * s.threads + bytes_of(bias_row(s)));
    if (!working) return OUT_OF_MEMORY;
    if (!s.slide) no_bias(bias = (float *)(working + each * s.threads), s);
#pragma omp parallel num_threads(s.threads)
    {
        char *next = working + each * omp_get_thread_num();
        float *values = take(&next, block), *panels = take(&next, block), *weights = take(&next, TILE * KEYS);
        float *x = take(&next, all), *result = take(&next, all);
        Softmax *softmax = take(&next, 2 * most); /* of two numbers */
#pragma omp for schedule(dynamic)
        for (int task = 0; task < pairs_of(s) * tasks; task++) {
            const int pair = task / tasks, begin = task % tasks * most, queries = smaller(most, s.N - begin);
            const int rows = rounded_up(queries, ROWS);
            lay_rows(rows_of(q, s, pair, begin), q.row, queries, s.K, x, rows, width);
            memset(result, 0, (size_t)rows * width * sizeof(float));
            for (int i = 0; i < rows; i++) softmax[i] = (Softmax){-INFINITY, 0};
            int end = keys_of(s, begin + queries);
            for (int start = begin * s.slide; start < end; start += KEYS) {
                const int there = smaller(KEYS, end - start), laid = keys_laid(s, there);
                lay_keys(k, s, pair, start, there, values, laid, width);
                lay_panels(values, width, laid, panels);
                lay_keys(v, s, pair, start, there, values, laid, width);
                for (int first = 0; first < queries; first += TILE) {
                    if (!meet(begin + first, start, s)) continue;
                    by_panels(x + first * width, panels, weights, begin + first, start, s, width);
                    for (int i = first; i < smaller(first + TILE, rows); i++) {
                        const int key = start - (begin + i) * s.slide; /* the key of column 0, relative to this query */
                        Span seen = span_of(begin + i / ROWS * ROWS, start, s);
                        float *row = weights + (i - first) * KEYS;
                        weigh(row, bias_of(bias, s, pair % s.H) + key, seen, softmax + i, result + i * width, width);
                        if (s.dropout > 0) drop(row, seen, key, s.dropout, seed_of(s, pair, begin + i));
                    }
                    by_keys(weights, values, result + first * width, begin + first, start, s, width);
                }
            }
            float *to = rows_of(out, s, pair, begin);
            for (int i = 0; i < queries; i++, to += out.row) {
                const float factor = 1.0f / softmax[i].sum;
                for (int c = 0; c < s.K; c++) to[c] = result[i * width + c] * factor;
                log_sums[(int64_t)pair * s.N + begin + i] = softmax[i].highest + logf(softmax[i].sum);
            }
        }
    }
    free(working);
    return DONE;
}

/* dq, dk, dv like q, k, v; d_bias like bias, one for each lane, or none. */
int attention_backward(Shape s, Tensor q, const Tensor *k, const Tensor *v, float *bias, Tensor out,
                       const float *log_sums, Tensor d_out, Tensor dq, const Tensor *dk, const Tensor *dv,
                       float *d_bias) {
    const int width = rounded_up(s.K, LANES), most = rounded_up(s.N, ROWS), end = keys_of(s, s.N);
    const size_t block = KEYS * width, tiled = TILE * KEYS, all = (size_t)most * width;
    const size_t each = 5 * bytes_of(block) + 2 * bytes_of(tiled) + 3 * bytes_of(all) +
                        2 * bytes_of(most) + bytes_of(bias_row(s));
    char *working = room(each * s.threads + bytes_of(bias_row(s)));
    if (!working) return OUT_OF_MEMORY;
    if (!s.slide) no_bias(bias = (float *)(working + each * s.threads), s);
#pragma omp parallel num_threads(s.threads)
    {
        char *next = working + each * omp_get_thread_num();
        float *keys = take(&next, block), *key_panels = take(&next, block), *value_panels = take(&next, block);
        float *d_keys = take(&next, block), *d_values = take(&next, block);
        float *weights = take(&next, tiled), *d_weights = take(&next, tiled);
        float *x = take(&next, all), *d_x = take(&next, all), *result = take(&next, all);
        float *log_sum = take(&next, most), *along = take(&next, most);
        float *unused = take(&next, bias_row(s));
#pragma omp for schedule(dynamic)
        for (int pair = 0; pair < pairs_of(s); pair++) {
            float *pair_d_bias = s.slide ? bias_of(d_bias, s, pair) : unused + SIDE;
            memset(pair_d_bias - SIDE, 0, bias_row(s) * sizeof(float));
            lay_rows(rows_of(q, s, pair, 0), q.row, s.N, s.K, x, most, width);
            lay_rows(rows_of(d_out, s, pair, 0), d_out.row, s.N, s.K, d_x, most, width);
            memset(result, 0, all * sizeof(float));
            const float *results = rows_of(out, s, pair, 0);
            for (int i = 0; i < most; i++) {
                log_sum[i] = i < s.N ? log_sums[(int64_t)pair * s.N + i] : INFINITY; /* weights of 0 after N */
                along[i] = i < s.N ? dot(d_x + i * width, results + i * out.row, s.K) : 0;
            }
            for (int start = 0; start < end; start += KEYS) {
                const int there = smaller(KEYS, end - start), laid = keys_laid(s, there), fixed = s.fixed_keys - start;
                lay_keys(v, s, pair, start, there, keys, laid, width);
                lay_panels(keys, width, laid, value_panels);
                lay_keys(k, s, pair, start, there, keys, laid, width);
                lay_panels(keys, width, laid, key_panels);
                memset(d_keys, 0, laid * width * sizeof(float));
                memset(d_values, 0, laid * width * sizeof(float));
                for (int tile = 0; tile < s.N; tile += TILE) {
                    if (!meet(tile, start, s)) continue;
                    const float *q_tile = x + tile * width, *d_tile = d_x + tile * width;
                    by_panels(q_tile, key_panels, weights, tile, start, s, width);
                    by_panels(d_tile, value_panels, d_weights, tile, start, s, width);
                    for (int i = tile; i < smaller(tile + TILE, most); i++) {
                        const int key = start - i * s.slide;
                        Span seen = span_of(i / ROWS * ROWS, start, s);
                        float *row = weights + (i - tile) * KEYS, *d_row = d_weights + (i - tile) * KEYS;
                        float *own_bias = bias_of(bias, s, pair % s.H) + key;
                        float *own_d_bias = pair_d_bias + key;
                        if (s.dropout > 0)
                            weigh_backward(row, d_row, own_bias, own_d_bias, seen, log_sum[i], along[i], key, s.dropout,
                                           seed_of(s, pair, i));
                        else
                            weigh_backward(row, d_row, own_bias, own_d_bias, seen, log_sum[i], along[i], key, 0, 0);
                    }
                    by_keys(d_weights, keys, result + tile * width, tile, start, s, width);
                    if (fixed >= KEYS) continue;
                    by_queries(weights, d_tile, d_values, tile, start, s, width);
                    by_queries(d_weights, q_tile, d_keys, tile, start, s, width);
                }
                put_keys(d_keys, width, dk, s, pair, start, fixed, there);
                put_keys(d_values, width, dv, s, pair, start, fixed, there);
            }
            float *to = rows_of(dq, s, pair, 0);
            for (int i = 0; i < s.N; i++, to += dq.row) copy_row(result + i * width, to, s.K);
        }
    }
    free(working);
    return DONE;
}
