/* Convolution, max-pooling, bias and ReLU as one operation, forward and backward, for one client on one core.

   A pooled output is the value of one position of the convolution. So at most one position in POOL * POOL has a
   gradient, and none if ReLU gave zero. Libraries multiply by the zeros of the other positions. Here the nonzero
   gradients of a sample are listed, and each is multiplied with its window or its filter. That is at most a fourth of
   the products of a dense convolution. The forward pass skips nothing, but the values before pooling stay in the cache.

   Pictures are [sample, row, column, channel], with padding. The compiler gets these constants: CI and CO, the input
   and output channels; KH and KW, the sides of a filter; STRIDE; POOL, the side of the pooling windows; RELU, whether
   ReLU follows. No sum depends on memory addresses.

   Rows of filters are padded with zeros to whole vectors. So kernels may read beyond the end of a row, and up to SLACK
   numbers beyond the end of a picture. These numbers are multiplied by zeros, or their results are dropped. */

#if defined(__AVX512F__)
#define LANES 16
#define REGISTERS 24 /* registers for sums; the other ones are for factors */
#elif defined(__AVX__)
#define LANES 8
#define REGISTERS 12
#else
#define LANES 4
#define REGISTERS 12
#endif

#define ROW (KW * CI) /* numbers in a row of a window; they are neighbours in memory */
#define WIDE ((ROW + LANES - 1) / LANES)
#define PADDED (WIDE * LANES)
#define VECTORS ((CO + LANES - 1) / LANES)
#define OUT (VECTORS * LANES)
#define NOWHERE 255 /* the route of an output that ReLU set to zero */

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int mask __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef unsigned char byte;

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

INLINE vec load(const float *from) { return *(const vec *)from; }
INLINE void store(float *to, vec value) { *(vec *)to = value; }

/* Copy x, which may have any strides, to [n, h + 2 p, w + 2 p, CI], with zeros around each picture. */
void to_nhwc(const float *x, float *laid, long n, long h, long w, long p, long by_sample, long by_channel, long by_row,
             long by_column) {
    long wide = (w + 2 * p) * CI;
    for (long i = 0; i < n; i++)
        for (long r = -p; r < h + p; r++, laid += wide) {
            if (r < 0 || r >= h) {
                __builtin_memset(laid, 0, 4 * wide);
                continue;
            }
            const float *row = x + i * by_sample + r * by_row;
            float *to = laid + p * CI;
            __builtin_memset(laid, 0, 4 * p * CI);
            for (long q = 0; q < w; q++)
                for (int c = 0; c < CI; c++) to[q * CI + c] = row[q * by_column + c * by_channel];
            __builtin_memset(to + w * CI, 0, 4 * p * CI);
        }
}

/* Compute the convolution at some neighbouring pixels, for some vectors of channels. All sums are in registers. */
INLINE void strip(const float *x, long wide, const float *filters, const float *bias, float *to, const int pixels,
                  const int vectors) {
    vec sum[REGISTERS];
    UNROLL for (int k = 0; k < pixels * vectors; k++) sum[k] = load(bias + k % vectors * LANES);
    for (int r = 0; r < KH; r++, x += wide)
        for (int q = 0; q < ROW; q++, filters += vectors * LANES)
            UNROLL for (int k = 0; k < pixels * vectors; k++)
                sum[k] += x[k / vectors * STRIDE * CI + q] * load(filters + k % vectors * LANES);
    UNROLL for (int k = 0; k < pixels * vectors; k++) store(to + k / vectors * OUT + k % vectors * LANES, sum[k]);
}

/* Compute the convolution for a whole line, in strips of `pixels`. The last strip may repeat some pixels. */
INLINE void strips(const float *x, long wide, const float *filters, const float *bias, float *to, long columns,
                   const int pixels, const int vectors) {
    for (long b = 0; b < columns; b += pixels) {
        long at = b + pixels <= columns ? b : columns - pixels;
        strip(x + at * STRIDE * CI, wide, filters, bias, to + at * OUT, pixels, vectors);
    }
}

/* Compute a line in the widest strips that fit into registers, or in narrower strips if these repeat fewer pixels. */
INLINE void line(const float *x, long wide, const float *filters, const float *bias, float *to, long columns,
                 const int vectors) {
    enum { most = REGISTERS / 2, less = most - most / 6, least = most * 2 / 3 };
    long again = (most - columns % most) % most, fewer = (less - columns % less) % less;
    long fewest = (least - columns % least) % least;
    if (columns < least)
        strips(x, wide, filters, bias, to, columns, 1, vectors);
    else if (columns < less || (fewest < fewer && fewest < again))
        strips(x, wide, filters, bias, to, columns, least, vectors);
    else if (columns < most || fewer < again)
        strips(x, wide, filters, bias, to, columns, less, vectors);
    else
        strips(x, wide, filters, bias, to, columns, most, vectors);
}

/* Pool POOL lines, [POOL, pw * POOL, OUT], to one line [pw, CO]. `route` gets the position of each maximum. */
INLINE void pool(const float *lines, float *out, byte *route, long pw) {
    for (long b = 0; b < pw; b++, out += CO, route += CO) {
        float largest[OUT];
        int from[OUT];
        for (int c = 0; c < OUT; c += LANES) {
            const float *cell = lines + b * POOL * OUT + c;
            vec top = load(cell);
            mask at = {0};
            UNROLL for (int k = 1; k < POOL * POOL; k++) {
                vec other = load(cell + (k / POOL * pw * POOL + k % POOL) * OUT);
                mask more = other > top;
                top = (vec)((more & (mask)other) | (~more & (mask)top));
                at = (more & k) | (~more & at);
            }
            if (RELU) {
                mask positive = top > 0;
                top = (vec)(positive & (mask)top);
                at |= ~positive & NOWHERE;
            }
            store(largest + c, top);
            *(mask *)(from + c) = at;
        }
        for (int c = 0; c < CO; c++) out[c] = largest[c];
        for (int c = 0; c < CO; c++) route[c] = (byte)from[c];
    }
}

/* Compute outputs [n, ph, pw, CO] and the route from x [n, h, w, CI], weights [CO, CI, KH, KW] and a bias [CO] or NULL.

   `buffer` has space for (KH * ROW + 1 + POOL * pw * POOL) * OUT numbers. */
void convolve(const float *x, const float *weights, const float *bias, float *out, byte *route, float *buffer, long n,
              long h, long w, long ph, long pw) {
    long wide = w * CI, columns = pw * POOL;
    float *filters = buffer, *start = filters + KH * ROW * OUT, *lines = start + OUT, *filter = filters;
    for (int c = 0; c < OUT; c += 2 * LANES) /* two vectors of channels at a time; at the end there may be only one */
        for (int r = 0; r < KH; r++)
            for (int q = 0; q < KW; q++)
                for (int k = 0; k < CI; k++)
                    for (int d = c; d < c + 2 * LANES && d < OUT; d++)
                        *filter++ = d < CO ? weights[((d * CI + k) * KH + r) * KW + q] : 0;
    for (int c = 0; c < OUT; c++) start[c] = bias && c < CO ? bias[c] : 0;
    for (long i = 0; i < n; i++)
        for (long a = 0; a < ph; a++, out += pw * CO, route += pw * CO) {
            for (int r = 0; r < POOL; r++) {
                const float *from = x + (i * h + (a * POOL + r) * STRIDE) * wide;
                float *to = lines + r * columns * OUT;
                for (int c = 0; c + LANES < OUT; c += 2 * LANES)
                    line(from, wide, filters + c * KH * ROW, start + c, to + c, columns, 2);
                enum { last = OUT - LANES };
                if (VECTORS % 2) line(from, wide, filters + last * KH * ROW, start + last, to + last, columns, 1);
            }
            pool(lines, out, route, pw);
        }
}

/* The sums in registers are for ROWS rows of a window, and for COLUMNS vectors of each row. */
#define COLUMNS (WIDE < REGISTERS ? WIDE : REGISTERS)
#define ROWS (REGISTERS / COLUMNS < KH ? REGISTERS / COLUMNS : KH)

/* Multiply each window of x, at an offset in `place`, by a number in `times`. Add it to rows of a filter's gradient. */
INLINE void add_part(const float *x, long wide, const float *times, const int *place, int count, float *gradient,
                     const int rows, const int columns) {
    vec sum[REGISTERS];
    UNROLL for (int k = 0; k < rows * columns; k++)
        sum[k] = load(gradient + k / columns * PADDED + k % columns * LANES);
    for (int j = 0; j < count; j++) {
        const float *window = x + place[j];
        float number = times[j];
        UNROLL for (int k = 0; k < rows * columns; k++)
            sum[k] += number * load(window + k / columns * wide + k % columns * LANES);
    }
    UNROLL for (int k = 0; k < rows * columns; k++)
        store(gradient + k / columns * PADDED + k % columns * LANES, sum[k]);
}

INLINE void add_rows(const float *x, long wide, const float *times, const int *place, int count, float *gradient,
                     const int rows) {
    for (int c = 0; c + COLUMNS <= WIDE; c += COLUMNS)
        add_part(x + c * LANES, wide, times, place, count, gradient + c * LANES, rows, COLUMNS);
    enum { left = WIDE % COLUMNS, done = (WIDE - left) * LANES };
    if (left) add_part(x + done, wide, times, place, count, gradient + done, rows, left);
}

INLINE void add_windows(const float *x, long wide, const float *times, const int *place, int count, float *gradient) {
    for (int r = 0; r + ROWS <= KH; r += ROWS)
        add_rows(x + r * wide, wide, times, place, count, gradient + r * PADDED, ROWS);
    enum { left = KH % ROWS, done = KH - left };
    if (left) add_rows(x + done * wide, wide, times, place, count, gradient + done * PADDED, left);
}

/* Multiply a filter by each number in `times`, and add it to the window of dx at the number's offset in `place`. */
INLINE void spread(const float *filter, long wide, const float *times, const int *place, int count, float *dx) {
    for (int j = 0; j < count; j++)
        for (int r = 0; r < KH; r++)
            for (int v = 0; v < PADDED; v += LANES) {
                float *to = dx + place[j] + r * wide + v;
                store(to, load(to) + times[j] * load(filter + r * PADDED + v));
            }
}

/* List the gradients of one channel that ReLU lets pass, and the offsets of their windows in x. g is [ph, pw, CO]. */
INLINE int list(const float *g, const byte *route, const int *shift, long wide, long ph, long pw, float *times,
                int *place) {
    int count = 0;
    for (long a = 0; a < ph; a++)
        for (long b = 0; b < pw; b++, g += CO, route += CO) {
            int goes_on = *route != NOWHERE;
            times[count] = *g; /* if ReLU does not let it pass, the next gradient overwrites it */
            place[count] = (int)(a * POOL * STRIDE * wide + b * POOL * STRIDE * CI) + shift[goes_on ? *route : 0];
            count += goes_on;
        }
    return count;
}

/* Compute the gradients of weights [CO, CI, KH, KW] and bias [CO], and of x [n, h, w, CI] unless dx is NULL.

   g is the gradient of the outputs, [n, ph, pw, CO]. buffer has space for 2 * (CO * KH * PADDED + ph * pw + 1) numbers.
*/
void convolve_backward(const float *g, const byte *route, const float *x, const float *weights, float *dx, float *dw,
                       float *db, float *buffer, long n, long h, long w, long ph, long pw) {
    long wide = w * CI, cells = ph * pw;
    float *gradients = buffer, *filters = gradients + CO * KH * PADDED, *times = filters + CO * KH * PADDED;
    int *place = (int *)(times + cells + 1), shift[POOL * POOL];
    __builtin_memset(buffer, 0, 4l * 2 * CO * KH * PADDED);
    __builtin_memset(db, 0, 4 * CO);
    for (int k = 0; k < POOL * POOL; k++) shift[k] = (int)((k / POOL * w + k % POOL) * STRIDE * CI);
    for (int c = 0; c < CO; c++)
        for (int k = 0; k < CI; k++)
            for (int r = 0; r < KH; r++)
                for (int q = 0; q < KW; q++)
                    filters[(c * KH + r) * PADDED + q * CI + k] = weights[((c * CI + k) * KH + r) * KW + q];
    for (long i = 0; i < n; i++, x += h * wide, g += cells * CO, route += cells * CO) {
        if (dx) __builtin_memset(dx, 0, 4 * h * wide);
        for (int c = 0; c < CO; c++) {
            int count = list(g + c, route + c, shift, wide, ph, pw, times, place);
            float all = 0;
            for (int j = 0; j < count; j++) all += times[j];
            db[c] += all;
            add_windows(x, wide, times, place, count, gradients + c * KH * PADDED);
            if (dx) spread(filters + c * KH * PADDED, wide, times, place, count, dx);
        }
        if (dx) dx += h * wide;
    }
    for (int c = 0; c < CO; c++)
        for (int k = 0; k < CI; k++)
            for (int r = 0; r < KH; r++)
                for (int q = 0; q < KW; q++)
                    dw[((c * CI + k) * KH + r) * KW + q] = gradients[(c * KH + r) * PADDED + q * CI + k];
}
