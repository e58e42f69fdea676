/* Search: for each query the keys with the largest dot products, exactly. See `model/recall.py`.

   Keys pass by in panels, which stay in the first-level cache while all queries are multiplied with them. Of the scores,
   only those above the lowest of a query's best so far are taken in: after the first panels, few are. */

#include <immintrin.h>

#include "vectors.h"

/* A bit for each number of a vector for which it is true. */
#ifdef __AVX512F__
#define BITS(condition) _mm512_movepi32_mask((__m512i)(condition))
#else
#define BITS(condition) _mm256_movemask_ps((__m256)(condition))
#endif

#define MULTIPLE 48 /* of numbers in a row of `hidden`: whole panels */

typedef struct {
    int B, H, N, K;
    int keys, wanted;
    int threads;
} Search;

/* The best of a query so far, in no order; `lowest` is at `place`. */
typedef struct {
    float *scores; /* whole vectors, infinity behind those that are wanted */
    int64_t *slots;
    float lowest;
    int place;
} Best;

static void take_in(Best *best, float score, int64_t slot, int wanted) {
    best->scores[best->place] = score;
    best->slots[best->place] = slot;
    vector least = (vector){0} + INFINITY;
    for (int i = 0; i < wanted; i += LANES) {
        vector x = *(vector *)(best->scores + i);
        least = choose(x < least, x, least);
    }
    best->lowest = -largest_of(-least);
    for (best->place = 0; best->scores[best->place] != best->lowest;) best->place++;
}

/* A row of a panel's scores; hidden: minus infinity for keys that don't count, else 0. */
INLINE void look_at(const float *row, const float *hidden, int64_t first, Best *best, int wanted) {
    for (int j = 0; j < PANEL; j += LANES) {
        vector x = *(const vector *)(row + j) + *(const vector *)(hidden + j);
        for (unsigned above = BITS(x > best->lowest); above; above &= above - 1) {
            int i = __builtin_ctz(above);
            if (x[i] > best->lowest) take_in(best, x[i], first + j + i, wanted);
        }
    }
}

static int any_counts(const float *hidden) {
    for (int j = 0; j < PANEL; j++)
        if (hidden[j] == 0) return 1;
    return 0;
}

/* q (B, H, N, K), keys (B, H, keys, K), hidden (B, keys rounded up to a MULTIPLE) -> scores and slots
   (B * H, N, wanted); minus infinity and 0 where there are fewer keys. */
void search(Search s, Tensor q, Tensor k, const float *hidden, float *scores, int64_t *slots) {
    const int width = rounded_up(s.K, LANES), queries = rounded_up(s.N, ROWS), row = rounded_up(s.wanted, LANES);
#pragma omp parallel num_threads(s.threads)
    {
        float *keys = room(PANEL * width), *panel = room(PANEL * width), *x = room((size_t)queries * width);
        float *best_scores = room((size_t)queries * row), products[ROWS * PANEL];
        Best *best = malloc(s.N * sizeof(Best));
#pragma omp for schedule(dynamic)
        for (int pair = 0; pair < s.B * s.H; pair++) {
            const int lane = pair / s.H, head = pair % s.H;
            const float *own_hidden = hidden + (int64_t)lane * rounded_up(s.keys, MULTIPLE);
            lay_rows(q.data + lane * q.lane + head * q.head, q.row, s.N, s.K, x, queries, width);
            for (int i = 0; i < s.N; i++) {
                best[i] = (Best){best_scores + i * row, slots + ((int64_t)pair * s.N + i) * s.wanted, -INFINITY, 0};
                memset(best[i].slots, 0, s.wanted * sizeof(int64_t));
                for (int j = 0; j < row; j++) best[i].scores[j] = j < s.wanted ? -INFINITY : INFINITY;
            }
            for (int first = 0; first < s.keys; first += PANEL) {
                if (!any_counts(own_hidden + first)) continue;
                const float *from = k.data + lane * k.lane + head * k.head + first * k.row;
                lay_rows(from, k.row, s.keys - first, s.K, keys, PANEL, width);
                lay_panels(keys, width, PANEL, panel);
                for (int i = 0; i < s.N; i += ROWS) {
                    block_of(3, x + i * width, width, 1, panel, PANEL, products, PANEL, width, 0);
                    for (int j = 0; j < smaller(ROWS, s.N - i); j++)
                        look_at(products + j * PANEL, own_hidden + first, first, best + i + j, s.wanted);
                }
            }
            for (int i = 0; i < s.N; i++)
                memcpy(scores + ((int64_t)pair * s.N + i) * s.wanted, best[i].scores, s.wanted * sizeof(float));
        }
        free(keys), free(panel), free(x), free(best_scores), free(best);
    }
}
