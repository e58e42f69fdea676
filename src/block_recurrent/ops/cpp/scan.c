/* The recurrent state through all blocks of a call, forward and backward, where the update is an average: the state
   attends to itself and to two blocks of tokens, and moves towards a linear map of the result.

   Lanes are independent, so each thread processes all blocks of a lane: the weights, which all lanes share, and the data
   of the lane stay in its second-level cache, and no thread waits for another. The inputs of the weight gradients are
   written to memory; these gradients are products over all blocks at once, which torch computes.

   D, H, K, S, W, T are as in docs/model.md. S is a multiple of 8; D and K are multiples of 16. Called
   from `scan.py` in this folder. */

#include <omp.h>

#include "vectors.h"

typedef struct {
    int B, S, D, H, K, W, T;
    float epsilon;
    int threads;
} Scan;

typedef struct {
    const float *norm, *ids, *projection, *scales; /* (D), (S, D), (4HK, D), (3H) */
    const float *map, *bias, *keep;                /* (D, 2HK), (D), (D) */
} Weights;

/* Saved by the forward pass for the backward pass, for each block of each lane. */
typedef struct {
    float *states, *x, *joined;             /* (T, B, S, D) after the block; (T, B, S, D); (T, B, S, 4HK) */
    float *attention, *candidate, *log_sums; /* (T, B, S, 2HK); (T, B, S, D); (T, B, 2, H, S) */
} Saved;

#define AT(pointer, k) (*(vector *)((pointer) + (k)))

/* ---- Products ---------------------------------------------------------------------------------------------------- */

/* Numbers of a matrix in panels. */
static size_t panels_size(int depth, int columns) { return (size_t)depth * rounded_up(columns, PANEL); }

/* (depth x columns) -> panels of depth x PANEL. */
static void cut_panels(const float *rows, int depth, int columns, float *out) {
    for (int column = 0; column < columns; column += PANEL, out += (size_t)depth * PANEL)
        for (int k = 0; k < depth; k++)
            copy_row(rows + (size_t)k * columns + column, out + k * PANEL, smaller(PANEL, columns - column));
}

/* c (rows x columns) = a (rows x depth) times panels. Rows: a multiple of 8; columns: of a vector. */
static void times(const float *a, int64_t a_row, int rows, const float *panels, int depth, int columns, float *c,
                  int64_t c_row) {
    for (int column = 0; column < columns; column += PANEL, panels += (size_t)depth * PANEL) {
        const int vectors = smaller(PANEL, columns - column) / LANES;
        for (int i = 0; i < rows; i += ROWS) {
            const float *from = a + i * a_row;
            float *to = c + i * c_row + column;
            if (vectors == 3) block_of(3, from, a_row, 1, panels, PANEL, to, c_row, depth, 0);
            else if (vectors == 2) block_of(2, from, a_row, 1, panels, PANEL, to, c_row, depth, 0);
            else block_of(1, from, a_row, 1, panels, PANEL, to, c_row, depth, 0);
        }
    }
}

/* ---- Norms ------------------------------------------------------------------------------------------------------- */

INLINE float inverse_length(const float *x, int K, float share, float epsilon) {
    vector sum = {0};
    for (int k = 0; k < K; k += LANES) sum += AT(x, k) * AT(x, k);
    return 1.0f / sqrtf(share * sum_of(sum) + epsilon);
}

/* The rows of one head -> of unit length, times a scale. */
static void unit_rows(const float *x, int64_t x_row, Scan s, float scale, float *out, int64_t out_row) {
    for (int i = 0; i < s.S; i++, x += x_row, out += out_row) {
        const float factor = scale * inverse_length(x, s.K, 1, s.epsilon);
        for (int k = 0; k < s.K; k += LANES) AT(out, k) = AT(x, k) * factor;
    }
}

/* From gradients of the result dy (S x K) to those of x; returns that of the scale. */
static float unit_rows_backward(const float *x, int64_t x_row, Scan s, float scale, const float *dy, float *dx,
                                int64_t dx_row) {
    float d_scale = 0;
    for (int i = 0; i < s.S; i++, x += x_row, dy += s.K, dx += dx_row) {
        const float inverse = inverse_length(x, s.K, 1, s.epsilon), along = dot(x, dy, s.K) * inverse;
        d_scale += along;
        for (int k = 0; k < s.K; k += LANES) AT(dx, k) = (AT(dy, k) - AT(x, k) * (along * inverse)) * (scale * inverse);
    }
    return d_scale;
}

/* ---- Attention of one head, all queries over all keys ------------------------------------------------------------ */

/* Working memory of a thread. Rows after the last key are zeros. */
typedef struct {
    int keys, padded; /* their number, and the same rounded up to whole vectors */
    float *q, *key_rows, *key_panels, *value_rows, *value_panels; /* S x K; padded x K each */
    float *weights, *d_weights;                                   /* S x padded */
    float *d_out, *dq, *dk, *dv;                                  /* S x K, S x K, padded x K each */
} Head;

static int most_keys(Scan s) { return rounded_up(larger(s.S, 2 * s.W), LANES); }

static size_t head_size(Scan s) {
    const size_t rows = bytes_of((size_t)s.S * s.K), keys = bytes_of((size_t)most_keys(s) * s.K);
    return 3 * rows + 4 * keys + 2 * bytes_of(panels_size(s.K, most_keys(s))) +
           2 * bytes_of((size_t)s.S * most_keys(s));
}

static Head take_head(char **next, Scan s) {
    const size_t rows = (size_t)s.S * s.K, keys = (size_t)most_keys(s) * s.K, panels = panels_size(s.K, most_keys(s));
    Head head = {.q = take(next, rows), .d_out = take(next, rows), .dq = take(next, rows)};
    head.key_rows = take(next, keys), head.value_rows = take(next, keys);
    head.dk = take(next, keys), head.dv = take(next, keys);
    head.key_panels = take(next, panels), head.value_panels = take(next, panels);
    head.weights = take(next, (size_t)s.S * most_keys(s)), head.d_weights = take(next, (size_t)s.S * most_keys(s));
    return head;
}

static void lay_head(Head *head, Scan s, int keys, const float *k, int64_t k_row, const float *v, int64_t v_row) {
    head->keys = keys, head->padded = rounded_up(keys, LANES);
    lay_rows(k, k_row, keys, s.K, head->key_rows, head->padded, s.K);
    lay_rows(v, v_row, keys, s.K, head->value_rows, head->padded, s.K);
    lay_panels(head->key_rows, s.K, head->padded, head->key_panels);
}

/* out (S x K), and the logarithms of the sums of softmax. */
static void attend(Head head, Scan s, float *out, int64_t out_row, float *log_sums) {
    times(head.q, s.K, s.S, head.key_panels, s.K, head.padded, head.weights, head.padded);
    for (int first = 0; first < s.S; first += ROWS) {
        float sums[ROWS];
        for (int i = 0; i < ROWS; i++) {
            float *row = head.weights + (size_t)(first + i) * head.padded;
            for (int j = head.keys; j < head.padded; j++) row[j] = -INFINITY;
            vector most = (vector){0} - INFINITY, sum = {0};
            for (int j = 0; j < head.padded; j += LANES) most = choose(AT(row, j) > most, AT(row, j), most);
            const float highest = largest_of(most);
            for (int j = 0; j < head.padded; j += LANES) sum += AT(row, j) = exp_of(AT(row, j) - highest);
            sums[i] = sum_of(sum);
            log_sums[first + i] = highest + logf(sums[i]);
        }
        float *to = out + first * out_row;
        rows_times(head.weights + (size_t)first * head.padded, head.padded, 1, head.value_rows, s.K, to, out_row,
                   head.padded, s.K, 0);
        for (int i = 0; i < ROWS; i++)
            for (int k = 0; k < s.K; k += LANES) AT(to + i * out_row, k) *= 1.0f / sums[i];
    }
}

/* Gradients of queries, keys and values, from those of the result (head.d_out). */
static void attend_backward(Head head, Scan s, const float *out, int64_t out_row, const float *log_sums) {
    const int padded = head.padded;
    lay_panels(head.value_rows, s.K, padded, head.value_panels);
    times(head.q, s.K, s.S, head.key_panels, s.K, padded, head.weights, padded);
    times(head.d_out, s.K, s.S, head.value_panels, s.K, padded, head.d_weights, padded);
    for (int i = 0; i < s.S; i++) {
        float *row = head.weights + (size_t)i * padded, *d_row = head.d_weights + (size_t)i * padded;
        const float along = dot(head.d_out + i * s.K, out + i * out_row, s.K);
        for (int j = head.keys; j < padded; j++) row[j] = -INFINITY;
        for (int j = 0; j < padded; j += LANES) {
            AT(row, j) = exp_of(AT(row, j) - log_sums[i]);
            AT(d_row, j) = AT(row, j) * (AT(d_row, j) - along);
        }
    }
    for (int i = 0; i < s.S; i += ROWS)
        rows_times(head.d_weights + (size_t)i * padded, padded, 1, head.key_rows, s.K, head.dq + i * s.K, s.K, padded,
                   s.K, 0);
    for (int j = 0; j < padded; j += ROWS) {
        rows_times(head.d_weights + j, 1, padded, head.q, s.K, head.dk + j * s.K, s.K, s.S, s.K, 0);
        rows_times(head.weights + j, 1, padded, head.d_out, s.K, head.dv + j * s.K, s.K, s.S, s.K, 0);
    }
}

/* ---- Functions called from Python -------------------------------------------------------------------------------- */

/* The address of a block of a lane, in an array with this many numbers per block. */
static float *at(float *of_all, Scan s, int t, int lane, size_t each) { return of_all + ((size_t)t * s.B + lane) * each; }

static float *heads_of(Tensor x, int lane, int head, int row) {
    return x.data + lane * x.lane + head * x.head + row * x.row;
}

/* state (B, S, D), k and v (B, H, (1 + T) W, K) -> `saved`; keys and values of the state before each block, (T * B, H, S, K). */
int state_scan(Scan s, const float *state, Weights w, Tensor k, Tensor v, Saved saved, Tensor keys, Tensor values) {
    const int HK = s.H * s.K, SD = s.S * s.D;
    const size_t projection = bytes_of(panels_size(s.D, 4 * HK)), map = bytes_of(panels_size(2 * HK, s.D));
    const size_t each = head_size(s);
    char *working = room(projection + map + each * s.threads);
    if (!working) return OUT_OF_MEMORY;
    float *to_heads = (float *)working, *to_candidate = (float *)(working + projection);
    lay_panels(w.projection, s.D, 4 * HK, to_heads);
    lay_panels(w.map, 2 * HK, s.D, to_candidate);
#pragma omp parallel for num_threads(s.threads) schedule(dynamic)
    for (int lane = 0; lane < s.B; lane++) {
        char *next = working + projection + map + each * omp_get_thread_num();
        Head head = take_head(&next, s);
        for (int t = 0; t < s.T; t++) {
            const float *old = t ? at(saved.states, s, t - 1, lane, SD) : state + (size_t)lane * SD;
            float *x = at(saved.x, s, t, lane, SD), *joined = at(saved.joined, s, t, lane, (size_t)s.S * 4 * HK);
            float *attention = at(saved.attention, s, t, lane, (size_t)s.S * 2 * HK);
            float *log_sums = at(saved.log_sums, s, t, lane, (size_t)2 * s.H * s.S);
            for (int i = 0; i < SD; i += s.D) {
                const float inverse = inverse_length(old + i, s.D, 1.0f / s.D, s.epsilon);
                for (int j = 0; j < s.D; j += LANES)
                    AT(x, i + j) = AT(old, i + j) * inverse * AT(w.norm, j) + AT(w.ids, i + j);
            }
            times(x, s.D, s.S, to_heads, s.D, 4 * HK, joined, 4 * HK);
            for (int h = 0; h < s.H; h++) {
                const float *own = joined + h * s.K;
                float *own_keys = heads_of(keys, t * s.B + lane, h, 0), *own_values = heads_of(values, t * s.B + lane, h, 0);
                unit_rows(own + HK, 4 * HK, s, w.scales[h], own_keys, keys.row);
                for (int i = 0; i < s.S; i++) copy_row(own + (size_t)i * 4 * HK, own_values + i * values.row, s.K);
                unit_rows(own + 2 * HK, 4 * HK, s, w.scales[s.H + h], head.q, s.K);
                lay_head(&head, s, s.S, own_keys, keys.row, own_values, values.row);
                attend(head, s, attention + h * s.K, 2 * HK, log_sums + h * s.S);
                unit_rows(own + 3 * HK, 4 * HK, s, w.scales[2 * s.H + h], head.q, s.K);
                lay_head(&head, s, 2 * s.W, heads_of(k, lane, h, t * s.W), k.row, heads_of(v, lane, h, t * s.W), v.row);
                attend(head, s, attention + HK + h * s.K, 2 * HK, log_sums + (s.H + h) * s.S);
            }
            float *candidate = at(saved.candidate, s, t, lane, SD), *new = at(saved.states, s, t, lane, SD);
            times(attention, 2 * HK, s.S, to_candidate, 2 * HK, s.D, candidate, s.D);
            for (int i = 0; i < SD; i += s.D)
                for (int j = 0; j < s.D; j += LANES) {
                    const vector z = AT(candidate, i + j) += AT(w.bias, j);
                    AT(new, i + j) = z + AT(w.keep, j) * (AT(old, i + j) - z);
                }
        }
    }
    free(working);
    return DONE;
}

/* Gradients of weights that are sums over rows, one for each lane. */
typedef struct {
    float *norm, *ids, *scales, *keep; /* (B, D), (B, S, D), (B, 3H), (B, D) */
} Sums;

/* d_states (T, B, S, D), and d_keys and d_values (T * B, H, S, K): gradients of the results of the forward pass, or none ->
   d_state (B, S, D), dk and dv, `sums`, and gradients of the products' results: d_joined, d_candidate like `saved`. */
int state_scan_backward(Scan s, const float *state, Weights w, Tensor k, Tensor v, Saved saved, const float *d_states,
                        Tensor d_keys, Tensor d_values, float *d_state, Tensor dk, Tensor dv, Sums sums,
                        float *all_d_joined, float *all_d_candidate) {
    const int HK = s.H * s.K, SD = s.S * s.D;
    const size_t projection = bytes_of(panels_size(4 * HK, s.D)), map = bytes_of(panels_size(s.D, 2 * HK));
    const size_t each = head_size(s) + bytes_of((size_t)s.S * 2 * HK) + bytes_of(SD) + bytes_of((size_t)s.S * s.K);
    char *working = room(projection + map + each * s.threads);
    if (!working) return OUT_OF_MEMORY;
    float *from_heads = (float *)working, *from_candidate = (float *)(working + projection);
    cut_panels(w.projection, 4 * HK, s.D, from_heads);
    cut_panels(w.map, s.D, 2 * HK, from_candidate);
#pragma omp parallel for num_threads(s.threads) schedule(dynamic)
    for (int lane = 0; lane < s.B; lane++) {
        char *next = working + projection + map + each * omp_get_thread_num();
        Head head = take_head(&next, s);
        float *d_attention = take(&next, (size_t)s.S * 2 * HK), *d_x = take(&next, SD);
        float *own_keys = take(&next, (size_t)s.S * s.K);
        float *d = d_state + (size_t)lane * SD, *d_norm = sums.norm + (size_t)lane * s.D;
        float *d_ids = sums.ids + (size_t)lane * SD, *d_scales = sums.scales + lane * 3 * s.H;
        float *d_keep = sums.keep + (size_t)lane * s.D;
        memset(d, 0, SD * sizeof(float)), memset(d_ids, 0, SD * sizeof(float));
        memset(d_norm, 0, s.D * sizeof(float)), memset(d_keep, 0, s.D * sizeof(float));
        memset(d_scales, 0, 3 * s.H * sizeof(float));
        for (int h = 0; h < s.H; h++)
            for (int i = 0; i < (1 + s.T) * s.W; i++) {
                memset(heads_of(dk, lane, h, i), 0, s.K * sizeof(float));
                memset(heads_of(dv, lane, h, i), 0, s.K * sizeof(float));
            }
        for (int t = s.T - 1; t >= 0; t--) {
            const float *old = t ? at(saved.states, s, t - 1, lane, SD) : state + (size_t)lane * SD;
            const float *candidate = at(saved.candidate, s, t, lane, SD);
            const float *joined = at(saved.joined, s, t, lane, (size_t)s.S * 4 * HK);
            const float *attention = at(saved.attention, s, t, lane, (size_t)s.S * 2 * HK);
            const float *log_sums = at(saved.log_sums, s, t, lane, (size_t)2 * s.H * s.S);
            float *d_joined = at(all_d_joined, s, t, lane, (size_t)s.S * 4 * HK);
            float *d_candidate = at(all_d_candidate, s, t, lane, SD);
            if (d_states) {
                const float *given = d_states + ((size_t)t * s.B + lane) * SD;
                for (int i = 0; i < SD; i += LANES) AT(d, i) += AT(given, i);
            }
            for (int i = 0; i < SD; i += s.D)
                for (int j = 0; j < s.D; j += LANES) {
                    const vector own = AT(d, i + j), kept = own * AT(w.keep, j);
                    AT(d_keep, j) += own * (AT(old, i + j) - AT(candidate, i + j));
                    AT(d_candidate, i + j) = own - kept;
                    AT(d, i + j) = kept;
                }
            times(d_candidate, s.D, s.S, from_candidate, s.D, 2 * HK, d_attention, 2 * HK);
            for (int h = 0; h < s.H; h++) {
                const float *own = joined + h * s.K;
                float *d_own = d_joined + h * s.K;

                unit_rows(own + HK, 4 * HK, s, w.scales[h], own_keys, s.K);
                unit_rows(own + 2 * HK, 4 * HK, s, w.scales[s.H + h], head.q, s.K);
                lay_head(&head, s, s.S, own_keys, s.K, own, 4 * HK);
                lay_rows(d_attention + h * s.K, 2 * HK, s.S, s.K, head.d_out, s.S, s.K);
                attend_backward(head, s, attention + h * s.K, 2 * HK, log_sums + h * s.S);
                d_scales[s.H + h] += unit_rows_backward(own + 2 * HK, 4 * HK, s, w.scales[s.H + h], head.dq,
                                                        d_own + 2 * HK, 4 * HK);
                for (int i = 0; i < s.S; i++) {
                    float *d_key = head.dk + i * s.K, *d_value = head.dv + i * s.K;
                    const float *key = d_keys.data ? heads_of(d_keys, t * s.B + lane, h, i) : 0;
                    const float *value = d_values.data ? heads_of(d_values, t * s.B + lane, h, i) : 0;
                    for (int c = 0; key && c < s.K; c += LANES) AT(d_key, c) += AT(key, c);
                    for (int c = 0; value && c < s.K; c += LANES) AT(d_value, c) += AT(value, c);
                    copy_row(d_value, d_own + (size_t)i * 4 * HK, s.K);
                }
                d_scales[h] += unit_rows_backward(own + HK, 4 * HK, s, w.scales[h], head.dk, d_own + HK, 4 * HK);

                unit_rows(own + 3 * HK, 4 * HK, s, w.scales[2 * s.H + h], head.q, s.K);
                lay_head(&head, s, 2 * s.W, heads_of(k, lane, h, t * s.W), k.row, heads_of(v, lane, h, t * s.W), v.row);
                lay_rows(d_attention + HK + h * s.K, 2 * HK, s.S, s.K, head.d_out, s.S, s.K);
                attend_backward(head, s, attention + HK + h * s.K, 2 * HK, log_sums + (s.H + h) * s.S);
                d_scales[2 * s.H + h] += unit_rows_backward(own + 3 * HK, 4 * HK, s, w.scales[2 * s.H + h], head.dq,
                                                            d_own + 3 * HK, 4 * HK);
                for (int i = 0; i < 2 * s.W; i++) {
                    float *d_key = heads_of(dk, lane, h, t * s.W + i), *d_value = heads_of(dv, lane, h, t * s.W + i);
                    for (int c = 0; c < s.K; c += LANES) {
                        AT(d_key, c) += AT(head.dk, i * s.K + c);
                        AT(d_value, c) += AT(head.dv, i * s.K + c);
                    }
                }
            }
            times(d_joined, 4 * HK, s.S, from_heads, 4 * HK, s.D, d_x, s.D);
            for (int i = 0; i < SD; i += s.D) {
                const float inverse = inverse_length(old + i, s.D, 1.0f / s.D, s.epsilon);
                vector sum = {0};
                for (int j = 0; j < s.D; j += LANES) sum += AT(old, i + j) * AT(d_x, i + j) * AT(w.norm, j);
                const float along = sum_of(sum) / s.D * inverse * inverse * inverse;
                for (int j = 0; j < s.D; j += LANES) {
                    const vector scaled = AT(d_x, i + j) * inverse;
                    AT(d_ids, i + j) += AT(d_x, i + j);
                    AT(d_norm, j) += scaled * AT(old, i + j);
                    AT(d, i + j) += scaled * AT(w.norm, j) - AT(old, i + j) * along;
                }
            }
        }
    }
    free(working);
    return DONE;
}
