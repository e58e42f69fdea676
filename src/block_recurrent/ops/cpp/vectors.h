/* What the kernels share: vectors, products of small matrices in registers, layouts.

   Everything is float32. The compiler turns each operation on a vector into one instruction. */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16 /* numbers of a vector register */
#define ROWS 8   /* rows of a product that are summed in registers: 8 x 3 of 32 */
#else
#define LANES 8
#define ROWS 4 /* 4 x 3 of 16 */
#endif
#define PANEL (3 * LANES) /* columns of a product that are summed in registers */

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t integers __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t naturals __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))

INLINE int smaller(int a, int b) { return a < b ? a : b; }
INLINE int larger(int a, int b) { return a > b ? a : b; }
INLINE int rounded_up(int n, int to) { return (n + to - 1) / to * to; }

/* ---- Memory ------------------------------------------------------------------------------------------------------ */

/* A tensor (B, H, rows, K) in float32; strides in numbers, that of K is 1. */
typedef struct {
    float *data;
    int64_t lane, head, row;
} Tensor;

/* Working memory is one allocation for all threads, before any of them starts: if it fails, a function returns
   OUT_OF_MEMORY and changes nothing. */
enum { DONE, OUT_OF_MEMORY };

INLINE size_t bytes_of(size_t numbers) { return (numbers + 15) / 16 * 64; }
INLINE char *room(size_t bytes) { return aligned_alloc(64, bytes); }

/* Takes this many numbers from the working memory at `next`. */
INLINE void *take(char **next, size_t numbers) {
    void *taken = *next;
    *next += bytes_of(numbers);
    return taken;
}

/* ---- Products ---------------------------------------------------------------------------------------------------- */

/* C (ROWS x width) = or += A (ROWS x depth) B (depth x width), for a width of 1 to 3 vectors.
   A[i][k] is at a[i * a_row + k * a_col]. */
INLINE void block_of(const int vectors, const float *a, const int64_t a_row, const int64_t a_col, const float *b,
                     int64_t b_row, float *c, int64_t c_row, int depth, const int add) {
    vector sum[ROWS][3];
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < vectors; j++)
            sum[i][j] = add ? *(const vector *)(c + i * c_row + j * LANES) : (vector){0};
    for (int k = 0; k < depth; k++, b += b_row) {
        vector row[3];
        for (int j = 0; j < vectors; j++) row[j] = *(const vector *)(b + j * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < vectors; j++) sum[i][j] += a[i * a_row + k * a_col] * row[j];
    }
    for (int i = 0; i < ROWS; i++)
        for (int j = 0; j < vectors; j++) *(vector *)(c + i * c_row + j * LANES) = sum[i][j];
}

/* The same for any width that is a multiple of a vector. */
INLINE void rows_times(const float *a, const int64_t a_row, const int64_t a_col, const float *b, int64_t b_row,
                       float *c, int64_t c_row, int depth, int width, const int add) {
    int left = width / LANES;
    /* 4 = 2 + 2: faster than 3 + 1, which would wait for its sums */
    for (int take; left > 0; left -= take, b += take * LANES, c += take * LANES) {
        take = left == 4 ? 2 : smaller(left, 3);
        if (take == 3) block_of(3, a, a_row, a_col, b, b_row, c, c_row, depth, add);
        else if (take == 2) block_of(2, a, a_row, a_col, b, b_row, c, c_row, depth, add);
        else block_of(1, a, a_row, a_col, b, b_row, c, c_row, depth, add);
    }
}

/* Inline: rows are so short that calling memcpy would take longer. */
INLINE void copy_row(const float *x, float *out, int K) {
    int k = 0;
    for (; k + LANES <= K; k += LANES) *(vector *)(out + k) = *(const vector *)(x + k);
    for (; k < K; k++) out[k] = x[k];
}

/* rows x K -> rows x width, padded with zeros. */
INLINE void lay_rows(const float *x, int64_t x_row, int there, int K, float *out, int rows, int width) {
    for (int i = 0; i < smaller(there, rows); i++, x += x_row, out += width) {
        copy_row(x, out, K);
        for (int k = K; k < width; k++) out[k] = 0;
    }
    if (rows > there) memset(out, 0, (size_t)(there > 0 ? rows - there : rows) * width * sizeof(float));
}

/* Rows `by` apart exchange the columns that are as far apart: a step of `transpose`. */
INLINE void trade(vector *rows, const int by) {
    integers upper, lower;
    for (int c = 0; c < LANES; c++) upper[c] = c & by ? LANES + (c ^ by) : c, lower[c] = c & by ? LANES + c : c ^ by;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & by)) {
            const vector above = rows[i], below = rows[i + by];
            rows[i] = __builtin_shuffle(above, below, upper), rows[i + by] = __builtin_shuffle(above, below, lower);
        }
}

/* LANES x LANES numbers, in registers. */
INLINE void transpose(const float *x, int64_t x_row, float *out, int64_t out_row) {
    vector rows[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) rows[i] = *(const vector *)(x + i * x_row);
    trade(rows, 1), trade(rows, 2), trade(rows, 4);
    if (LANES > 8) trade(rows, 8);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) *(vector *)(out + i * out_row) = rows[i];
}

/* rows x width -> panels of width x PANEL, the layout of the right factor in the products above. The width is a multiple of a
   vector, and there are rows up to the next multiple of one. */
INLINE void lay_panels(const float *rows, int width, int count, float *out) {
    for (int first = 0; first < count; first += LANES, rows += LANES * width) {
        float *panel = out + first / PANEL * PANEL * width + first % PANEL;
        for (int k = 0; k < width; k += LANES) transpose(rows + k, width, panel + k * PANEL, PANEL);
    }
}

/* ---- Vectors ----------------------------------------------------------------------------------------------------- */

INLINE vector choose(integers where, vector a, vector b) {
#ifdef __AVX512F__
    return (vector)_mm512_mask_blend_ps(_mm512_movepi32_mask((__m512i)where), (__m512)b, (__m512)a);
#else
    return (vector)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)where);
#endif
}

/* exp(x) for x <= 0, to 1e-7; 0 below -87. NaN stays NaN. */
INLINE vector exp_of(vector x) {
    vector shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the integer is in the lowest bits */
    vector n = shifted - 12582912.0f;
    vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vector p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    return choose(x < -87.0f, (vector){0}, p * (vector)(((integers)shifted + 127) << 23));
}

/* Sums and maxima over the numbers of a vector, by halves. Intrinsics, because gcc compiles a shuffle with a computed
   index into 64 instructions that assemble the index number by number. */

#ifdef __AVX512F__
INLINE float sum_of(vector x) { return _mm512_reduce_add_ps((__m512)x); }
INLINE float largest_of(vector x) { return _mm512_reduce_max_ps((__m512)x); }
#else
INLINE float sum_of(vector x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

INLINE float largest_of(vector x) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#endif

INLINE float dot(const float *x, const float *y, int K) {
    vector sum = {0};
    int k = 0;
    for (; k + LANES <= K; k += LANES) sum += *(const vector *)(x + k) * *(const vector *)(y + k);
    float total = sum_of(sum);
    for (; k < K; k++) total += x[k] * y[k];
    return total;
}
