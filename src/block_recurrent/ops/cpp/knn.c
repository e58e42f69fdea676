/* Search: for each query the keys with the largest dot products, exactly; and attention over the entries that were
   found, without copying them. See `model/knn_memory.py`.

   Keys are processed in panels, which stay in the first-level cache while all queries are multiplied with them. Scores
   above a query's threshold are candidates. When there are several times as many as wanted, only the best are kept, and
   the lowest of them is the new threshold: most scores are read once, in a vector, and discarded. */

#include <immintrin.h>

#include <omp.h>

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

/* Of a query, in no order. */
typedef struct {
    float *scores;
    int32_t *slots;
    int count;
} Candidates;

static int most_candidates(Search s) { return 4 * s.wanted + PANEL; }

/* Floats as integers with the same order. */

typedef union {
    float number;
    int32_t bits;
} Bits;

INLINE int32_t in_order(int32_t bits) { return bits ^ (bits >> 31 & 0x7FFFFFFF); } /* its own inverse */

INLINE int32_t rank_of(float x) { return in_order((Bits){.number = x}.bits); }

INLINE float of_rank(int32_t rank) { return (Bits){.bits = in_order(rank)}.number; }

/* The score that exactly `wanted` scores reach, or more if some are equal. */
static float threshold_of(const float *scores, int count, int wanted) {
    int32_t low = rank_of(-INFINITY), high = rank_of(INFINITY); /* enough scores reach low, too few exceed high */
    while (low < high) {
        const int32_t middle = (int32_t)(((int64_t)low + high + 1) >> 1);
        int reach = 0;
        for (int i = 0; i < count; i++) reach += rank_of(scores[i]) >= middle;
        if (reach == wanted) return of_rank(middle);
        if (reach > wanted) low = middle;
        else high = middle - 1;
    }
    return of_rank(low);
}

/* Keeps only the best. Returns the score that a candidate must exceed. */
static float keep_best(Candidates *found, int wanted) {
    if (found->count < wanted) return -INFINITY;
    const float threshold = threshold_of(found->scores, found->count, wanted);
    int equal = wanted, kept = 0; /* how many scores equal to the threshold are kept */
    for (int i = 0; i < found->count; i++) equal -= found->scores[i] > threshold;
    for (int i = 0; i < found->count; i++) {
        const float score = found->scores[i];
        const int stays = score > threshold || (score == threshold && equal-- > 0);
        found->scores[kept] = score;
        found->slots[kept] = found->slots[i];
        kept += stays;
    }
    found->count = kept;
    return threshold;
}

/* A row of a panel's scores; hidden: minus infinity for masked keys, else 0. */
INLINE void look_at(const float *row, const float *hidden, int first, float *threshold, Candidates *found, Search s) {
    for (int j = 0; j < PANEL; j += LANES) {
        vector x = *(const vector *)(row + j) + *(const vector *)(hidden + j);
        for (unsigned above = BITS(x > *threshold); above; above &= above - 1) {
            const int i = j + __builtin_ctz(above);
            found->scores[found->count] = row[i];
            found->slots[found->count++] = first + i;
        }
    }
    if (found->count > most_candidates(s) - PANEL) *threshold = keep_best(found, s.wanted);
}

static int any_counts(const float *hidden) {
    for (int j = 0; j < PANEL; j++)
        if (hidden[j] == 0) return 1;
    return 0;
}

/* q (B, H, N, K), keys (B, H, keys, K), hidden (B, keys rounded up to a MULTIPLE) -> scores and slots
   (B * H, N, wanted); minus infinity and 0 where there are fewer keys. */
int search(Search s, Tensor q, Tensor k, const float *hidden, float *scores, int64_t *slots) {
    const int width = rounded_up(s.K, LANES), queries = rounded_up(s.N, ROWS), most = most_candidates(s);
    const size_t block = PANEL * width, all = (size_t)queries * width, candidates = (size_t)s.N * most;
    const size_t lists = s.N * (sizeof(Candidates) / sizeof(float));
    const size_t each = 2 * bytes_of(block) + bytes_of(all) + 2 * bytes_of(candidates) + bytes_of(s.N) + bytes_of(lists);
    char *working = room(each * s.threads);
    if (!working) return OUT_OF_MEMORY;
#pragma omp parallel num_threads(s.threads)
    {
        char *next = working + each * omp_get_thread_num();
        float *keys = take(&next, block), *panel = take(&next, block), *x = take(&next, all);
        float *found_scores = take(&next, candidates), *thresholds = take(&next, s.N), products[ROWS * PANEL];
        int32_t *found_slots = take(&next, candidates);
        Candidates *found = take(&next, lists);
#pragma omp for schedule(dynamic)
        for (int pair = 0; pair < s.B * s.H; pair++) {
            const int lane = pair / s.H, head = pair % s.H;
            const float *own_hidden = hidden + (int64_t)lane * rounded_up(s.keys, MULTIPLE);
            lay_rows(q.data + lane * q.lane + head * q.head, q.row, s.N, s.K, x, queries, width);
            for (int i = 0; i < s.N; i++) {
                thresholds[i] = -INFINITY;
                found[i] = (Candidates){found_scores + (size_t)i * most, found_slots + (size_t)i * most, 0};
            }
            for (int first = 0; first < s.keys; first += PANEL) {
                if (!any_counts(own_hidden + first)) continue;
                const float *from = k.data + lane * k.lane + head * k.head + first * k.row;
                lay_rows(from, k.row, s.keys - first, s.K, keys, PANEL, width);
                lay_panels(keys, width, PANEL, panel);
                for (int i = 0; i < s.N; i += ROWS) {
                    block_of(3, x + i * width, width, 1, panel, PANEL, products, PANEL, width, 0);
                    for (int j = 0; j < smaller(ROWS, s.N - i); j++)
                        look_at(products + j * PANEL, own_hidden + first, first, thresholds + i + j, found + i + j, s);
                }
            }
            for (int i = 0; i < s.N; i++) {
                keep_best(found + i, s.wanted);
                for (int j = 0; j < s.wanted; j++) {
                    const int64_t to = ((int64_t)pair * s.N + i) * s.wanted + j;
                    scores[to] = j < found[i].count ? found[i].scores[j] : -INFINITY;
                    slots[to] = j < found[i].count ? found[i].slots[j] : 0;
                }
            }
        }
    }
    free(working);
    return DONE;
}

/* ---- Attention over the entries found ---------------------------------------------------------------------------- */

/* Softmax of a query's scores. A missing entry counts as a key of zeros. */
static void weigh_found(const float *scores, int count, float *weights) {
    float highest = -INFINITY, sum = 0;
    for (int j = 0; j < count; j++) {
        weights[j] = scores[j] > -INFINITY ? scores[j] : 0;
        highest = weights[j] > highest ? weights[j] : highest;
    }
    for (int j = 0; j < count; j++) sum += weights[j] = expf(weights[j] - highest);
    for (int j = 0; j < count; j++) weights[j] /= sum;
}

/* The entries found for a query are far apart in memory: they are prefetched during other work. */
static void fetch(const float *entries, int64_t row, const int64_t *slots, Search s) {
    for (int j = 0; j < s.wanted; j++)
        for (int c = 0; c < s.K; c += 16) __builtin_prefetch(entries + slots[j] * row + c);
}

/* out (K) = weights (wanted) times the existing entries. */
static void add_up(const float *weights, const float *scores, const int64_t *slots, const float *entries, int64_t row,
                   float *restrict out, Search s) {
    memset(out, 0, s.K * sizeof(float));
    for (int j = 0; j < s.wanted; j++) {
        if (scores[j] == -INFINITY) continue;
        const float *entry = entries + slots[j] * row, weight = weights[j];
        for (int c = 0; c < s.K; c++) out[c] += weight * entry[c];
    }
}

INLINE const float *head_of(Tensor x, Search s, int64_t query) {
    return x.data + query / s.N / s.H * x.lane + query / s.N % s.H * x.head;
}

INLINE float *row_of(Tensor x, Search s, int64_t query) { return (float *)head_of(x, s, query) + query % s.N * x.row; }

/* v (B, H, keys, K), scores and slots as above -> out (B, H, N, K). */
int attend_found(Search s, Tensor v, const float *scores, const int64_t *slots, Tensor out) {
    const int64_t queries = (int64_t)s.B * s.H * s.N, n = s.wanted;
    char *working = room(bytes_of(n) * s.threads);
    if (!working) return OUT_OF_MEMORY;
#pragma omp parallel num_threads(s.threads)
    {
        float *weights = (float *)(working + bytes_of(n) * omp_get_thread_num());
#pragma omp for schedule(static)
        for (int64_t i = 0; i < queries; i++) {
            if (i + 1 < queries) fetch(head_of(v, s, i + 1), v.row, slots + (i + 1) * n, s);
            weigh_found(scores + i * n, n, weights);
            add_up(weights, scores + i * n, slots + i * n, head_of(v, s, i), v.row, row_of(out, s, i), s);
        }
    }
    free(working);
    return DONE;
}

/* dq like q: keys and values of the memory need no gradients. */
int attend_found_backward(Search s, Tensor k, Tensor v, const float *scores, const int64_t *slots, Tensor d_out,
                          Tensor dq) {
    const int64_t queries = (int64_t)s.B * s.H * s.N, n = s.wanted;
    char *working = room(2 * bytes_of(n) * s.threads);
    if (!working) return OUT_OF_MEMORY;
#pragma omp parallel num_threads(s.threads)
    {
        char *next = working + 2 * bytes_of(n) * omp_get_thread_num();
        float *weights = take(&next, n), *d_weights = take(&next, n);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < queries; i++) {
            if (i + 1 < queries) fetch(head_of(v, s, i + 1), v.row, slots + (i + 1) * n, s);
            fetch(head_of(k, s, i), k.row, slots + i * n, s);
            weigh_found(scores + i * n, n, weights);
            float along = 0; /* the sum of weights times their gradients */
            for (int j = 0; j < n; j++) {
                const int there = scores[i * n + j] > -INFINITY;
                const float *value = head_of(v, s, i) + slots[i * n + j] * v.row;
                d_weights[j] = there ? dot(row_of(d_out, s, i), value, s.K) : 0;
                along += weights[j] * d_weights[j];
            }
            for (int j = 0; j < n; j++) weights[j] *= d_weights[j] - along; /* gradients of logits, now */
            add_up(weights, scores + i * n, slots + i * n, head_of(k, s, i), k.row, row_of(dq, s, i), s);
        }
    }
    free(working);
    return DONE;
}
