/* Cross-entropy of hidden vectors, without storing the logits; forward and backward in one call. See `model/loss.py`.

   The logits of a chunk of tokens are computed for one slab of the vocabulary at a time. While a slab is in the
   second-level cache, its exponentials are computed, and the gradient of the hidden vectors is summed; only the gradient
   of the table has to wait for the sums over the whole vocabulary, so that exponentials go through memory once. As in
   online softmax, each slab's exponentials are relative to the largest logit so far, and are corrected later. */

#include <immintrin.h>
#include <omp.h>

#include "vectors.h"

#define CHUNK 512 /* tokens: a multiple of TILE */
#define TILE 32   /* tokens whose logits are computed together: a multiple of ROWS */
#define SLAB 240  /* pieces of the vocabulary: a multiple of PANEL */
#define GROUP 16  /* pieces: exponentials of a slab are kept as (SLAB / GROUP, CHUNK, GROUP), by whole cache lines */

#ifdef __AVX512F__
#define STREAM(to, x) _mm512_stream_ps(to, (__m512)(x))
#else
#define STREAM(to, x) _mm256_stream_ps(to, (__m256)(x))
#endif

typedef struct {
    int N, D, V; /* D: a multiple of 16 */
    int threads;
} Problem;

/* Sums of a thread over its slabs, for each token of the chunk. */
typedef struct {
    float most[CHUNK], sum[CHUNK]; /* of the logits; and of exponentials relative to it */
    float *d_hidden;               /* (CHUNK, D), relative to it, too */
    float *rows;                   /* (SLAB, D): of the table, or of its gradient */
    float *scaled;                 /* (CHUNK, D) */
    float *tile;                   /* (TILE, SLAB) */
} Part;

/* The logits of the tile -> exponentials, in place; the largest logit so far of each token also in `reference`. */
static void exponentials(Part *part, int tokens, int there, float *reference, int token, int D) {
    const int columns = rounded_up(there, LANES);
    for (int i = 0; i < tokens; i++) {
        float *row = part->tile + i * SLAB, before = part->most[token + i];
        for (int j = there; j < columns; j++) row[j] = -INFINITY;
        vector most = *(vector *)row, sum = {0};
        for (int j = LANES; j < columns; j += LANES) {
            vector x = *(vector *)(row + j);
            most = choose(x > most, x, most);
        }
        float now = largest_of(most);
        now = now > before ? now : before;
        for (int j = 0; j < columns; j += LANES) sum += *(vector *)(row + j) = exp_of(*(vector *)(row + j) - now);
        if (now > before) { /* the previous sums are relative to a smaller one */
            const float factor = expf(before - now);
            float *d_hidden = part->d_hidden + (int64_t)(token + i) * D;
            part->sum[token + i] *= factor;
            for (int d = 0; d < D; d += LANES) *(vector *)(d_hidden + d) *= factor;
        }
        part->sum[token + i] += sum_of(sum);
        part->most[token + i] = reference[token + i] = now;
    }
}

/* Writes a tile of exponentials to its place in the slab, bypassing the caches: they are needed much later. */
static void put_away(const float *tile, int tokens, int there, float *slab, int token) {
    for (int i = 0; i < tokens; i++)
        for (int piece = 0; piece < there; piece += LANES)
            STREAM(slab + ((int64_t)(piece / GROUP) * CHUNK + token + i) * GROUP + piece % GROUP,
                   *(const vector *)(tile + i * SLAB + piece));
    _mm_sfence(); /* visible to the thread that reads them next */
}

/* hidden (N, D), table (V, D), targets (N) -> losses (N), and the gradients of the sum of counts * losses, counts (N)
   being 0 or 1: d_hidden (N, D) and d_table (V, D), or NULL where they are not wanted. */
int cross_entropy(Problem p, const float *hidden, const float *table, const int64_t *targets, const float *counts,
                  float *losses, float *d_hidden, float *d_table) {
    const int D = p.D, slabs = (p.V + SLAB - 1) / SLAB;
    const size_t kept = d_table ? (size_t)slabs * CHUNK * SLAB : 0, vectors = (size_t)CHUNK * D, slab_rows = SLAB * D;
    const size_t part_numbers = p.threads * sizeof(Part) / sizeof(float);
    const size_t each = 2 * bytes_of(vectors) + bytes_of(slab_rows) + bytes_of(TILE * SLAB);
    const size_t shared = bytes_of(kept) + bytes_of((size_t)slabs * CHUNK) + bytes_of(slabs * slab_rows) +
                          bytes_of(vectors) + bytes_of(part_numbers);
    char *working = room(shared + each * p.threads), *next = working;
    if (!working) return OUT_OF_MEMORY;
    float *all = take(&next, kept), *references = take(&next, (size_t)slabs * CHUNK);
    float *panels = take(&next, slabs * slab_rows), *x = take(&next, vectors);
    float of_target[CHUNK], total[CHUNK], most[CHUNK];
    Part *parts = take(&next, part_numbers);
    for (int t = 0; t < p.threads; t++) {
        parts[t].d_hidden = take(&next, vectors), parts[t].scaled = take(&next, vectors);
        parts[t].rows = take(&next, slab_rows), parts[t].tile = take(&next, TILE * SLAB);
    }
    for (int begin = 0; begin < p.N; begin += CHUNK) {
        const int tokens = smaller(CHUNK, p.N - begin), whole = rounded_up(tokens, ROWS);
        memcpy(x, hidden + (int64_t)begin * D, (size_t)tokens * D * sizeof(float));
        memset(x + (int64_t)tokens * D, 0, (size_t)(whole - tokens) * D * sizeof(float));
        for (int t = 0; t < p.threads; t++) { /* all of them: OpenMP may start fewer threads than requested */
            for (int i = 0; i < CHUNK; i++) parts[t].most[i] = -INFINITY, parts[t].sum[i] = 0.0f;
            memset(parts[t].d_hidden, 0, (size_t)CHUNK * D * sizeof(float));
        }
#pragma omp parallel num_threads(p.threads)
        {
            Part *part = parts + omp_get_thread_num();
            /* The assignment of slabs to threads is fixed, so that sums are bitwise identical. */
#pragma omp for schedule(static)
            for (int slab = 0; slab < slabs; slab++) {
                const int first = slab * SLAB, there = smaller(SLAB, p.V - first);
                float *own_panels = panels + (int64_t)first * D;
                memcpy(part->rows, table + (int64_t)first * D, (size_t)there * D * sizeof(float));
                memset(part->rows + there * D, 0, (size_t)(SLAB - there) * D * sizeof(float));
                if (begin == 0) lay_panels(part->rows, D, there, own_panels);
                for (int token = 0; token < whole; token += TILE) {
                    const int rows = smaller(TILE, whole - token);
                    for (int column = 0; column < there; column += PANEL)
                        for (int i = 0; i < rows; i += ROWS)
                            block_of(3, x + (int64_t)(token + i) * D, D, 1, own_panels + column * D, PANEL,
                                     part->tile + i * SLAB + column, SLAB, D, 0);
                    for (int i = token; i < smaller(token + rows, tokens); i++)
                        if (targets[begin + i] >= first && targets[begin + i] < first + SLAB)
                            of_target[i] = part->tile[(i - token) * SLAB + targets[begin + i] - first];
                    exponentials(part, rows, there, references + (int64_t)slab * CHUNK, token, D);
                    for (int i = 0; d_hidden && i < rows; i += ROWS)
                        rows_times(part->tile + i * SLAB, SLAB, 1, part->rows, D,
                                   part->d_hidden + (int64_t)(token + i) * D, D, there, D, 1);
                    if (d_table) put_away(part->tile, rows, there, all + (int64_t)slab * CHUNK * SLAB, token);
                }
            }
            /* Every thread has processed some of the slabs. */
#pragma omp for schedule(static)
            for (int i = 0; i < tokens; i++) {
                float largest = parts[0].most[i], sum = 0.0f;
                for (int t = 1; t < p.threads; t++) largest = parts[t].most[i] > largest ? parts[t].most[i] : largest;
                for (int t = 0; t < p.threads; t++) sum += parts[t].sum[i] * expf(parts[t].most[i] - largest);
                most[i] = largest, total[i] = sum;
                losses[begin + i] = largest + logf(sum) - of_target[i];
                if (!d_hidden) continue;
                float *d = d_hidden + (int64_t)(begin + i) * D, count = counts[begin + i];
                const float *target = table + targets[begin + i] * D;
                for (int k = 0; k < D; k++) d[k] = -target[k] * count;
                for (int t = 0; t < p.threads; t++) {
                    const float factor = expf(parts[t].most[i] - largest) / sum * count;
                    for (int k = 0; k < D; k++) d[k] += parts[t].d_hidden[(int64_t)i * D + k] * factor;
                }
            }
#pragma omp for schedule(static)
            for (int slab = 0; slab < (d_table ? slabs : 0); slab++) {
                const int first = slab * SLAB, there = smaller(SLAB, p.V - first);
                const float *reference = references + (int64_t)slab * CHUNK, *own = all + (int64_t)slab * CHUNK * SLAB;
                for (int i = 0; i < tokens; i++) {
                    const float factor = expf(reference[i] - most[i]) / total[i] * counts[begin + i];
                    for (int k = 0; k < D; k++) part->scaled[(int64_t)i * D + k] = x[(int64_t)i * D + k] * factor;
                }
                for (int piece = 0; piece < there; piece += ROWS)
                    rows_times(own + (int64_t)(piece / GROUP) * CHUNK * GROUP + piece % GROUP, 1, GROUP, part->scaled, D,
                               part->rows + piece * D, D, tokens, D, 0);
                float *to = d_table + (int64_t)first * D;
                if (begin == 0) memcpy(to, part->rows, (size_t)there * D * sizeof(float));
                else for (int k = 0; k < there * D; k++) to[k] += part->rows[k];
            }
        }
        for (int i = 0; d_table && i < tokens; i++) {
            float *to = d_table + targets[begin + i] * D;
            for (int k = 0; k < D; k++) to[k] -= x[(int64_t)i * D + k] * counts[begin + i];
        }
    }
    free(working);
    return DONE;
}
