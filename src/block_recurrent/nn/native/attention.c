/* Attention on a CPU, forward and backward: over a sliding window with a learned bias by distance, or over all keys.

   Query i of a head sees W keys, from key i * slide on, with logits q[i].k[j] + bias[j - i * slide]. With slide 1 that
   is the window of SPEC section 2 (the first W keys are of the tokens before); with slide 0 all queries see all keys.
   What `nn/tiles.py` does in many calls of torch happens here for a tile of queries at a time, while its logits and
   weights are in the second-level cache: nothing of size N x W goes through memory.

   Heads of lanes ("pairs") are independent. The queries of a pair are cut into chunks, the keys of a chunk are laid out
   as the products want them, and chunks are cut into tiles. Letters as everywhere: N, W, K; L columns of a tile.

   Compiled for AVX-512 and for AVX2, and called from `attention.py` beside this file. */

#include "vectors.h"

#define TILE 48 /* queries of a tile: a multiple of ROWS and of PANEL */

typedef struct {
    int B, H, N, K, W;
    int slide;
    int bias_row; /* W, rounded up to a multiple of 16 */
    float dropout;
    uint64_t seed; /* of the dropout mask, which is never stored: the backward pass draws it again */
    int threads;
} Shape;

static float *rows_of(Tensor x, Shape s, int pair, int row) {
    return x.data + pair / s.H * x.lane + pair % s.H * x.head + row * x.row;
}

/* Sizes of the work on one chunk: twice as many queries as the window is long, so that few keys are laid out twice. */
typedef struct {
    int width; /* K, rounded up to whole vectors */
    int queries, keys, L;
} Sizes;

static Sizes sizes_of(Shape s) {
    Sizes z;
    z.width = rounded_up(s.K, LANES);
    z.queries = rounded_up(smaller(larger(2 * s.W, 4 * TILE), s.N), TILE);
    z.keys = rounded_up(z.queries * s.slide + s.W, PANEL);
    z.L = rounded_up(TILE * s.slide + s.bias_row + ROWS, PANEL);
    return z;
}

/* ---- Products ---------------------------------------------------------------------------------------------------- */

/* The three kinds of products of a tile. Blocks that none of their queries see are left out. */

/* out (TILE x L) = x (TILE x K) times keys, in panels (K x PANEL): logits, or the gradient of weights. */
static void by_panels(const float *x, const float *panels, float *out, int rows, Shape s, Sizes z) {
    for (int column = 0; column < z.L; column += PANEL, panels += PANEL * z.width)
        for (int i = 0; i < rows; i += ROWS)
            if (column < (i + ROWS - 1) * s.slide + s.W && column + PANEL > i * s.slide)
                block_of(3, x + i * z.width, z.width, 1, panels, PANEL, out + i * z.L + column, z.L, z.width, 0);
}

/* out (TILE x K) = weights (TILE x L) times values (L x K). */
static void by_keys(const float *weights, const float *values, float *out, int rows, Shape s, Sizes z) {
    for (int i = 0; i < rows; i += ROWS)
        rows_times(weights + i * z.L + i * s.slide, z.L, 1, values + i * s.slide * z.width, z.width, out + i * z.width,
                   z.width, s.W + (ROWS - 1) * s.slide, z.width, 0);
}

/* out (L x K) += weights' (L x TILE) times x (TILE x K): the gradients of values and keys. */
static void by_queries(const float *weights, const float *x, float *out, int rows, Shape s, Sizes z) {
    for (int column = 0; column < (rows - 1) * s.slide + s.W; column += ROWS) {
        int first = s.slide ? larger(0, column - s.W + 1) : 0, end = s.slide ? smaller(rows, column + ROWS) : rows;
        rows_times(weights + first * z.L + column, 1, z.L, x + first * z.width, z.width, out + column * z.width,
                   z.width, end - first, z.width, 1);
    }
}

/* ---- Softmax and dropout of a row -------------------------------------------------------------------------------- */

/* A row is as long as the bias: W, rounded up to whole vectors. The bias is minus infinity behind W. */

/* A seed for the mask of each query; splitmix64. */
static uint32_t seed_of(Shape s, int pair, int i) {
    uint64_t x = s.seed + ((uint64_t)pair * s.N + i) * 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return (uint32_t)(x ^ x >> 31);
}

/* Times 0, or the inverse of the share that is kept. */
static void drop(float *row, Shape s, uint32_t seed) {
    const uint32_t below = (uint32_t)(s.dropout * 4294967296.0);
    const float scale = 1.0f / (1.0f - s.dropout);
    naturals place;
    for (int i = 0; i < LANES; i++) place[i] = seed + i * 0x9E3779B9u;
    for (int j = 0; j < s.bias_row; j += LANES, place += LANES * 0x9E3779B9u) {
        naturals x = (place ^ place >> 16) * 0x7FEB352Du;
        x = (x ^ x >> 15) * 0x846CA68Bu;
        vector *at = (vector *)(row + j);
        *at = choose((x ^ x >> 16) < below, (vector){0}, *at * scale);
    }
}

/* Logits -> weights times their sum, in place; returns that sum, and the logarithm of the sum of exponentials. */
static float softmax(float *row, const float *bias, Shape s, float *log_sum) {
    vector most = (vector){0} - INFINITY, sum = {0};
    for (int j = 0; j < s.bias_row; j += LANES) {
        vector x = *(vector *)(row + j) + *(const vector *)(bias + j);
        *(vector *)(row + j) = x;
        most = choose(x > most, x, most);
    }
    const float highest = largest_of(most);
    for (int j = 0; j < s.bias_row; j += LANES) sum += *(vector *)(row + j) = exp_of(*(vector *)(row + j) - highest);
    *log_sum = highest + logf(sum_of(sum));
    return sum_of(sum);
}

/* Logits -> weights, and gradients of (dropped) weights -> gradients of logits, both in place; adds to d_bias. */
static void softmax_backward(float *row, float *d_row, const float *bias, float log_sum, float *d_bias, Shape s,
                             uint32_t seed) {
    if (s.dropout > 0) drop(d_row, s, seed);
    vector sum = {0};
    for (int j = 0; j < s.bias_row; j += LANES) {
        vector weight = exp_of(*(vector *)(row + j) + *(const vector *)(bias + j) - log_sum);
        *(vector *)(row + j) = weight;
        sum += weight * *(vector *)(d_row + j);
    }
    const float along = sum_of(sum);
    for (int j = 0; j < s.bias_row; j += LANES) {
        vector d_logit = *(vector *)(row + j) * (*(vector *)(d_row + j) - along);
        *(vector *)(d_row + j) = d_logit;
        *(vector *)(d_bias + j) += d_logit;
    }
    if (s.dropout > 0) drop(row, s, seed);
}

/* Zeros on both sides of the W numbers of row i, as far as products in blocks of ROWS and whole vectors look. */
INLINE void clear_sides(float *row, int i, Shape s) {
    for (int j = 1; j <= i % ROWS * s.slide; j++) row[-j] = 0.0f;
    for (int j = s.W; j < larger(s.bias_row, s.W + ROWS - 1); j++) row[j] = 0.0f;
}

/* ---- Layouts ------------------------------------------------------------------------------------------------------ */

/* rows x K -> rows x width: zeros behind K, and behind the rows that there are. */
static void lay_rows(const float *x, int64_t x_row, int there, int K, float *out, int rows, int width) {
    for (int i = 0; i < rows; i++) {
        int filled = i < there ? K : 0;
        memcpy(out + i * width, x + i * x_row, filled * sizeof(float));
        memset(out + i * width + filled, 0, (width - filled) * sizeof(float));
    }
}

static void add_rows(const float *x, int width, float *out, int64_t out_row, int rows, int K) {
    for (int i = 0; i < rows; i++)
        for (int k = 0; k < K; k++) out[i * out_row + k] += x[i * width + k];
}

/* ---- What Python calls -------------------------------------------------------------------------------------------- */

/* q (B, H, N, K), k and v (B, H, W + N * slide, K), bias (H, bias_row) -> out (B, H, N, K), log_sums (B * H, N). */
void attention(Shape s, Tensor q, Tensor k, Tensor v, const float *bias, Tensor out, float *log_sums) {
    Sizes z = sizes_of(s);
    int chunks = (s.N + z.queries - 1) / z.queries;
#pragma omp parallel num_threads(s.threads)
    {
        float *values = room((size_t)z.keys * z.width), *panels = room((size_t)z.keys * z.width);
        float *weights = room(TILE * z.L), *x = room(TILE * z.width), *result = room(TILE * z.width);
#pragma omp for schedule(dynamic)
        for (int task = 0; task < s.B * s.H * chunks; task++) {
            int pair = task / chunks, begin = task % chunks * z.queries, end = smaller(begin + z.queries, s.N);
            int there = s.W + (end - begin) * s.slide;
            const float *own_bias = bias + pair % s.H * s.bias_row;
            lay_rows(rows_of(k, s, pair, begin * s.slide), k.row, there, s.K, values, z.keys, z.width);
            lay_panels(values, z.width, z.keys, panels);
            lay_rows(rows_of(v, s, pair, begin * s.slide), v.row, there, s.K, values, z.keys, z.width);
            for (int first = begin; first < end; first += TILE) {
                int rows = smaller(TILE, end - first), whole = rounded_up(rows, ROWS);
                const int64_t offset = (int64_t)(first - begin) * s.slide * z.width;
                lay_rows(rows_of(q, s, pair, first), q.row, rows, s.K, x, whole, z.width);
                by_panels(x, panels + offset, weights, whole, s, z);
                float sums[TILE]; /* divided by in the end: a result is shorter than a row of weights */
                for (int i = 0; i < whole; i++) {
                    float *row = weights + i * z.L + i * s.slide;
                    clear_sides(row, i, s);
                    if (i < rows) sums[i] = softmax(row, own_bias, s, log_sums + (int64_t)pair * s.N + first + i);
                    if (i < rows && s.dropout > 0) drop(row, s, seed_of(s, pair, first + i));
                    if (i >= rows) memset(row, 0, s.W * sizeof(float));
                }
                by_keys(weights, values + offset, result, whole, s, z);
                for (int i = 0; i < rows; i++) {
                    float *to = rows_of(out, s, pair, first + i), factor = 1.0f / sums[i];
                    for (int c = 0; c < s.K; c++) to[c] = result[i * z.width + c] * factor;
                }
            }
        }
        free(values), free(panels), free(weights), free(x), free(result);
    }
}

/* dq, dk, dv like q, k, v; d_bias (B * H, bias_row), one for each lane. */
void attention_backward(Shape s, Tensor q, Tensor k, Tensor v, const float *bias, const float *log_sums, Tensor d_out,
                        Tensor dq, Tensor dk, Tensor dv, float *d_bias) {
    Sizes z = sizes_of(s);
#pragma omp parallel num_threads(s.threads)
    {
        const size_t all = (size_t)z.keys * z.width;
        float *keys = room(all), *key_panels = room(all), *value_panels = room(all);
        float *d_keys = room(all), *d_values = room(all);
        float *weights = room(TILE * z.L), *d_weights = room(TILE * z.L);
        float *x = room(TILE * z.width), *d_x = room(TILE * z.width), *result = room(TILE * z.width);
#pragma omp for schedule(dynamic)
        for (int pair = 0; pair < s.B * s.H; pair++) {
            const float *own_bias = bias + pair % s.H * s.bias_row;
            float *own_d_bias = d_bias + (int64_t)pair * s.bias_row;
            memset(own_d_bias, 0, s.bias_row * sizeof(float));
            for (int i = 0; i < s.W + s.N * s.slide; i++) {
                memset(rows_of(dk, s, pair, i), 0, s.K * sizeof(float));
                memset(rows_of(dv, s, pair, i), 0, s.K * sizeof(float));
            }
            for (int begin = 0; begin < s.N; begin += z.queries) {
                int end = smaller(begin + z.queries, s.N), there = s.W + (end - begin) * s.slide;
                lay_rows(rows_of(v, s, pair, begin * s.slide), v.row, there, s.K, keys, z.keys, z.width);
                lay_panels(keys, z.width, z.keys, value_panels);
                lay_rows(rows_of(k, s, pair, begin * s.slide), k.row, there, s.K, keys, z.keys, z.width);
                lay_panels(keys, z.width, z.keys, key_panels);
                memset(d_keys, 0, all * sizeof(float));
                memset(d_values, 0, all * sizeof(float));
                for (int first = begin; first < end; first += TILE) {
                    int rows = smaller(TILE, end - first), whole = rounded_up(rows, ROWS);
                    const int64_t offset = (int64_t)(first - begin) * s.slide * z.width;
                    lay_rows(rows_of(q, s, pair, first), q.row, rows, s.K, x, whole, z.width);
                    lay_rows(rows_of(d_out, s, pair, first), d_out.row, rows, s.K, d_x, whole, z.width);
                    by_panels(x, key_panels + offset, weights, whole, s, z);
                    by_panels(d_x, value_panels + offset, d_weights, whole, s, z);
                    for (int i = 0; i < whole; i++) {
                        float *row = weights + i * z.L + i * s.slide, *d_row = d_weights + i * z.L + i * s.slide;
                        clear_sides(row, i, s), clear_sides(d_row, i, s);
                        if (i < rows)
                            softmax_backward(row, d_row, own_bias, log_sums[(int64_t)pair * s.N + first + i],
                                             own_d_bias, s, seed_of(s, pair, first + i));
                        else
                            memset(row, 0, s.W * sizeof(float)), memset(d_row, 0, s.W * sizeof(float));
                    }
                    by_queries(weights, d_x, d_values + offset, whole, s, z);
                    by_queries(d_weights, x, d_keys + offset, whole, s, z);
                    by_keys(d_weights, keys + offset, result, whole, s, z);
                    for (int i = 0; i < rows; i++)
                        memcpy(rows_of(dq, s, pair, first + i), result + i * z.width, s.K * sizeof(float));
                }
                add_rows(d_keys, z.width, rows_of(dk, s, pair, begin * s.slide), dk.row, there, s.K);
                add_rows(d_values, z.width, rows_of(dv, s, pair, begin * s.slide), dv.row, there, s.K);
            }
        }
        free(keys), free(key_panels), free(value_panels), free(d_keys), free(d_values);
        free(weights), free(d_weights), free(x), free(d_x), free(result);
    }
}
