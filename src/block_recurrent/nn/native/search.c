/* Search: for each query the keys with the largest dot products, exactly. See `model/recall.py`.

   Keys pass by in blocks. The scores of a tile of queries are looked at while they are in the cache, and only those
   above the lowest of a query's best so far are taken in: after the first blocks, few are. */

#include <immintrin.h>

#include "vectors.h"

#define TILE 48  /* queries of a tile: a multiple of ROWS */
#define KEYS 240 /* of a block: a multiple of PANEL */

/* A bit for each number of a vector for which it is true. */
#ifdef __AVX512F__
#define BITS(condition) _mm512_movepi32_mask((__m512i)(condition))
#else
#define BITS(condition) _mm256_movemask_ps((__m256)(condition))
#endif

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
    for (int i = 0;; i += LANES) {
        unsigned found = BITS(*(vector *)(best->scores + i) == best->lowest);
        if (found) {
            best->place = i + __builtin_ctz(found);
            return;
        }
    }
}

/* A block's row of scores; hidden: minus infinity for keys that don't count, else 0. */
static void look_at(const float *row, const float *hidden, int64_t first, Best *best, int wanted) {
    for (int j = 0; j < KEYS; j += LANES) {
        vector x = *(const vector *)(row + j) + *(const vector *)(hidden + j);
        for (unsigned above = BITS(x > best->lowest); above; above &= above - 1) {
            int i = __builtin_ctz(above);
            if (x[i] > best->lowest) take_in(best, x[i], first + j + i, wanted);
        }
    }
}

/* q (B, H, N, K), keys (B, H, keys, K), hidden (B, keys rounded up to whole blocks) -> scores and slots
   (B * H, N, wanted); minus infinity and 0 where there are fewer keys. */
void search(Search s, Tensor q, Tensor k, const float *hidden, float *scores, int64_t *slots) {
    const int width = rounded_up(s.K, LANES), most = rounded_up(s.N, TILE), hidden_row = rounded_up(s.keys, KEYS);
#pragma omp parallel num_threads(s.threads)
    {
        float *keys = room(KEYS * width), *panels = room(KEYS * width), *tile = room(TILE * KEYS);
        float *x = room((size_t)most * width);
        Best *best = malloc(s.N * sizeof(Best));
        const int row = rounded_up(s.wanted, LANES);
        float *best_scores = room((size_t)s.N * row);
#pragma omp for schedule(dynamic)
        for (int pair = 0; pair < s.B * s.H; pair++) {
            const int lane = pair / s.H, head = pair % s.H;
            lay_rows(q.data + lane * q.lane + head * q.head, q.row, s.N, s.K, x, most, width);
            for (int i = 0; i < s.N; i++) {
                best[i] = (Best){best_scores + i * row, slots + ((int64_t)pair * s.N + i) * s.wanted, -INFINITY, 0};
                memset(best[i].slots, 0, s.wanted * sizeof(int64_t));
                for (int j = 0; j < row; j++) best[i].scores[j] = j < s.wanted ? -INFINITY : INFINITY;
            }
            for (int first = 0; first < s.keys; first += KEYS) {
                const float *from = k.data + lane * k.lane + head * k.head + first * k.row;
                lay_rows(from, k.row, s.keys - first, s.K, keys, KEYS, width);
                lay_panels(keys, width, KEYS, panels);
                for (int begin = 0; begin < s.N; begin += TILE) {
                    const int rows = smaller(TILE, s.N - begin);
                    for (int column = 0; column < KEYS; column += PANEL)
                        for (int i = 0; i < rows; i += ROWS)
                            block_of(3, x + (begin + i) * width, width, 1, panels + column * width, PANEL,
                                     tile + i * KEYS + column, KEYS, width, 0);
                    for (int i = 0; i < rows; i++)
                        look_at(tile + i * KEYS, hidden + (int64_t)lane * hidden_row + first, first, best + begin + i,
                                s.wanted);
                }
            }
            for (int i = 0; i < s.N; i++)
                memcpy(scores + ((int64_t)pair * s.N + i) * s.wanted, best[i].scores, s.wanted * sizeof(float));
        }
        free(keys), free(panels), free(tile), free(x), free(best), free(best_scores);
    }
}
