/* Normalization, y = x * weight / sqrt(share * sum(x^2) + epsilon) along rows of K numbers, with one weight (H, K) for
   each head; forward and backward in one pass over memory each. See `ops/norm.py`. */

#include "vectors.h"

typedef struct {
    int B, H, N, K; /* K: a multiple of 16 */
    float share, epsilon;
    int threads;
} Norm;

#define AT(pointer, k) (*(vector *)((pointer) + (k)))

/* All heads of a token follow. */
static float *token_of(Tensor x, Norm s, int token) { return x.data + token / s.N * x.lane + token % s.N * x.row; }

INLINE float inverse_length(const float *x, Norm s) {
    vector sum = {0};
    for (int k = 0; k < s.K; k += LANES) sum += AT(x, k) * AT(x, k);
    return 1.0f / sqrtf(s.share * sum_of(sum) + s.epsilon);
}

int norm(Norm s, Tensor x, const float *weight, Tensor y) {
#pragma omp parallel for num_threads(s.threads)
    for (int token = 0; token < s.B * s.N; token++) {
        const float *from = token_of(x, s, token), *w = weight;
        float *to = token_of(y, s, token);
        for (int head = 0; head < s.H; head++, from += x.head, to += y.head, w += s.K) {
            const float inverse = inverse_length(from, s);
            for (int k = 0; k < s.K; k += LANES) AT(to, k) = AT(from, k) * inverse * AT(w, k);
        }
    }
    return DONE;
}

/* d_weights (threads, H, K): the sums of each thread. */
int norm_backward(Norm s, Tensor x, const float *weight, Tensor d_y, Tensor d_x, float *d_weights) {
    memset(d_weights, 0, (size_t)s.threads * s.H * s.K * sizeof(float));
#pragma omp parallel for num_threads(s.threads) schedule(static, 1)
    for (int thread = 0; thread < s.threads; thread++) {
        const int64_t tokens = (int64_t)s.B * s.N;
        for (int token = tokens * thread / s.threads; token < tokens * (thread + 1) / s.threads; token++) {
            const float *from = token_of(x, s, token), *dy = token_of(d_y, s, token), *w = weight;
            float *dx = token_of(d_x, s, token), *dw = d_weights + (int64_t)thread * s.H * s.K;
            for (int head = 0; head < s.H; head++) {
                const float inverse = inverse_length(from, s);
                vector sum = {0};
                for (int k = 0; k < s.K; k += LANES) sum += AT(from, k) * AT(dy, k) * AT(w, k);
                const float along = sum_of(sum) * s.share * inverse * inverse * inverse;
                for (int k = 0; k < s.K; k += LANES) {
                    vector d = AT(dy, k) * inverse;
                    AT(dw, k) += d * AT(from, k);
                    AT(dx, k) = d * AT(w, k) - AT(from, k) * along;
                }
                from += x.head, dy += d_y.head, dx += d_x.head, w += s.K, dw += s.K;
            }
        }
    }
    return DONE;
}
