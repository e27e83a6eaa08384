// The outputs of a critic for many actions, a few rows at a time through all of its layers.
//
// Most of an update's arithmetic is in these values. A general matrix product writes each layer to
// memory and reads it back for every elementwise operation. Here a tile of rows stays in the CPU's
// cache from the first layer to the last, and activations are applied to sums that are still in
// registers. Vectors are GCC's and Clang's own extension; which registers there are is known when a
// process compiles this file for the machine that it runs on. Called by sampled_values.py.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16, VECTORS = 2, ROWS = 12;
#elif defined(__AVX2__)
constexpr int LANES = 8, VECTORS = 2, ROWS = 6;
#else
constexpr int LANES = 4, VECTORS = 4, ROWS = 4;
#endif
// Weights are packed in panels of this many outputs, so that a product reads them in order.
constexpr int PANEL = LANES * VECTORS;
// A multiple of ROWS in all three cases.
constexpr int TILE = 96;
// Rows whose sums are formed at once, since each waits for the one before. ROWS is a multiple of it.
constexpr int PAIR = 2;
// Rows whose distance is a power of two would compete for the same lines of the cache.
constexpr int GAP = 16;
// A panel of this many inputs takes a third of the first-level cache.
constexpr int DEPTH = 128;
#define UNROLLED _Pragma("GCC unroll 16")

typedef float Vector __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t Integers __attribute__((vector_size(LANES * sizeof(float))));

struct Step {
    int kind, inputs, outputs;
    float epsilon;
    const float *weight, *bias;
};

// What a step does with the tile x, and with the tiles y and z beside it. The names are those of
// sampled_values.py.
enum Kind { ACTIONS, NORM_TANH, ELU, BLOCK_NORM, BLOCK_WIDEN, BLOCK_NARROW, LAST_NORM };
enum Activation { NONE, BY_ELU, BY_RELU, BY_TANH };

static inline Vector load(const float* from) {
    Vector values;
    std::memcpy(&values, from, sizeof values);
    return values;
}

static inline void store(float* to, Vector values) { std::memcpy(to, &values, sizeof values); }
static inline Vector all(float value) { return value - Vector{}; }
// What is not a number stays so if it is the second argument. Compilers do not find AVX-512's own
// instructions for these functions.
#if defined(__AVX512F__)
static inline Vector smaller(Vector a, Vector b) { return _mm512_min_ps(a, b); }
static inline Vector larger(Vector a, Vector b) { return _mm512_max_ps(a, b); }
static inline float total(Vector values) { return _mm512_reduce_add_ps(values); }
#else
static inline Vector smaller(Vector a, Vector b) { return a < b ? a : b; }
static inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }
static inline float total(Vector values) {
    float sum = 0.0f;
    for (int lane = 0; lane < LANES; lane++) sum += values[lane];
    return sum;
}
#endif
static inline Vector between(float low, Vector x, float high) {
    return larger(all(low), smaller(all(high), x));
}

// Between -87 and 88, exp(x) = 2^n exp(r) with |r| <= ln(2) / 2, and exp(r) by its series to the sixth order.
static inline Vector exponential(Vector x) {
    // Adding 1.5 * 2^23 rounds to an integer, which is then in the lowest bits.
    const Vector shift = all(12582912.0f);
    const Vector shifted = x * 1.44269504f + shift;
    const Vector n = shifted - shift;
    const Vector r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    Vector series = r * (1.0f / 720.0f) + 1.0f / 120.0f;
    series = series * r + 1.0f / 24.0f;
    series = series * r + 1.0f / 6.0f;
    series = series * r + 0.5f;
    series = series * r + 1.0f;
    series = series * r + 1.0f;
    Integers bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits - 0x4B400000 + 127) << 23;
    Vector power;
    std::memcpy(&power, &bits, sizeof power);
    return series * power;
}

template <Activation activation>
static inline Vector activate(Vector x) {
    if (activation == BY_ELU) return larger(exponential(between(-87.0f, x, 0.0f)) - 1.0f, x);
    if (activation == BY_RELU) return larger(all(0.0f), x);
    if (activation == BY_TANH) return 1.0f - 2.0f / (exponential(between(-87.0f, x + x, 88.0f)) + 1.0f);
    return x;
}

static inline int padded(int size, int unit) { return (size + unit - 1) / unit * unit; }

// out = activation(in W + bias), or out += in W + bias. `rows` is a multiple of ROWS.
template <Activation activation, bool add>
static void product(const Step& step, const float* in, size_t in_stride, float* out, size_t stride,
                    int rows) {
    for (int column = 0; column < step.outputs; column += PANEL)
        for (int k = 0; k < step.inputs; k += DEPTH) {
            const int depth = std::min(DEPTH, step.inputs - k);
            const float* weights = step.weight + (size_t)column * step.inputs + k * PANEL;
            const bool is_first = k == 0, is_last = k + depth == step.inputs;
            for (int row = 0; row < rows; row += ROWS) {
                const float* inputs = in + row * in_stride + k;
                float* outputs = out + row * stride + column;
                Vector sums[ROWS][VECTORS];
                UNROLLED for (int i = 0; i < ROWS; i++)
                    UNROLLED for (int j = 0; j < VECTORS; j++) {
                        const Vector bias = load(step.bias + column + j * LANES);
                        const Vector before = load(outputs + i * stride + j * LANES);
                        sums[i][j] = !is_first ? before : add ? bias + before : bias;
                    }
                for (int d = 0; d < depth; d++) {
                    Vector w[VECTORS];
                    UNROLLED for (int j = 0; j < VECTORS; j++)
                        w[j] = load(weights + d * PANEL + j * LANES);
                    UNROLLED for (int i = 0; i < ROWS; i++)
                        UNROLLED for (int j = 0; j < VECTORS; j++)
                            sums[i][j] += inputs[i * in_stride + d] * w[j];
                }
                if (is_last)
                    UNROLLED for (int i = 0; i < ROWS; i++)
                        UNROLLED for (int j = 0; j < VECTORS; j++)
                            sums[i][j] = activate<activation>(sums[i][j]);
                UNROLLED for (int i = 0; i < ROWS; i++)
                    UNROLLED for (int j = 0; j < VECTORS; j++)
                        store(outputs + i * stride + j * LANES, sums[i][j]);
            }
        }
}

// Layer normalisation of each row. What is behind the last number of a row is zero and stays so.
template <Activation activation>
static void normalize(const Step& step, const float* in, float* out, size_t stride, int rows) {
    const int size = step.inputs, whole = size / LANES * LANES;
    float means[TILE], scales[TILE];
    for (int row = 0; row < rows; row += PAIR) {
        const float* from = in + row * stride;
        Vector sums[PAIR]{}, squares[PAIR]{};
        for (int c = 0; c < padded(size, PANEL); c += LANES)
            UNROLLED for (int i = 0; i < PAIR; i++) sums[i] += load(from + i * stride + c);
        float* mean = means + row;
        UNROLLED for (int i = 0; i < PAIR; i++) mean[i] = total(sums[i]) / size;
        for (int c = 0; c < whole; c += LANES)
            UNROLLED for (int i = 0; i < PAIR; i++) {
                const Vector distance = load(from + i * stride + c) - mean[i];
                squares[i] += distance * distance;
            }
        UNROLLED for (int i = 0; i < PAIR; i++) {
            float variance = total(squares[i]);
            for (int c = whole; c < size; c++) {
                const float distance = from[i * stride + c] - mean[i];
                variance += distance * distance;
            }
            scales[row + i] = 1.0f / std::sqrt(variance / size + step.epsilon);
        }
    }
    for (int row = 0; row < rows; row++, in += stride, out += stride)
        // Weight and bias are zero there.
        for (int c = 0; c < padded(size, PANEL); c += LANES) {
            const Vector normal = (load(in + c) - means[row]) * scales[row];
            store(out + c, activate<activation>(normal * load(step.weight + c) + load(step.bias + c)));
        }
}

extern "C" {

int panel() { return PANEL; }

// How many floats `values` needs as scratch; see there.
long scratch_size(int widest) { return 3L * TILE * (padded(widest, PANEL) + GAP); }

// Computes outputs [num_actions, batch, size]: a part of them, the rows from `begin` up to `end` in an
// order of its own, in which a few states come with all their actions, so that they stay in the cache.
//
// A row is a state and an action: `actions` [num_actions, batch, action size], and the state's part
// of the first layer `states` [batch, hidden]. The first step is the actions' part of that layer,
// and there is at least one more. `weight` [size, last hidden padded] and `bias` [size] are of the
// output. `widest` is the largest number of inputs or outputs of a step.
void values(const float* states, long batch, const float* actions, long num_actions,
            const Step* steps, int num_steps, int widest, const float* weight, const float* bias,
            int size, long begin, long end, float* scratch, float* out) {
    const size_t stride = padded(widest, PANEL) + GAP;
    const int action_size = steps[0].inputs, hidden = steps[0].outputs;
    const int width = padded(hidden, PANEL), last = padded(steps[num_steps - 1].outputs, PANEL);
    float *x = scratch, *y = x + TILE * stride, *z = y + TILE * stride;
    for (long start = begin; start < end; start += TILE) {
        // Up to a multiple of ROWS the tile has rows that mean nothing.
        const int used = (int)std::min<long>(TILE, end - start), rows = padded(used, ROWS);
        long places[TILE];
        for (int row = 0; row < used; row++) {
            const long first = (start + row) / (TILE * num_actions) * TILE;
            const long within = start + row - first * num_actions;
            const long together = std::min<long>(TILE, batch - first);
            const long state = first + within % together;
            places[row] = within / together * batch + state;
            float* to = x + row * stride;
            std::memcpy(to, states + state * hidden, hidden * sizeof(float));
            std::fill(to + hidden, to + width, 0.0f);
            const float* action = actions + places[row] * action_size;
            std::copy(action, action + action_size, z + row * action_size);
        }
        for (int index = 0; index < num_steps; index++) {
            const Step& step = steps[index];
            switch (step.kind) {
                case ACTIONS: product<NONE, true>(step, z, action_size, x, stride, rows); break;
                case NORM_TANH: normalize<BY_TANH>(step, x, x, stride, rows); break;
                case ELU:
                    product<BY_ELU, false>(step, x, stride, y, stride, rows);
                    std::swap(x, y);
                    break;
                case BLOCK_NORM: normalize<NONE>(step, x, y, stride, rows); break;
                case BLOCK_WIDEN: product<BY_RELU, false>(step, y, stride, z, stride, rows); break;
                case BLOCK_NARROW: product<NONE, true>(step, z, stride, x, stride, rows); break;
                case LAST_NORM: normalize<NONE>(step, x, x, stride, rows); break;
            }
        }
        for (int row = 0; row < used; row++)
            for (int o = 0; o < size; o++) {
                Vector sum{};
                for (int c = 0; c < last; c += LANES)
                    sum += load(x + row * stride + c) * load(weight + (size_t)o * last + c);
                out[places[row] * size + o] = total(sum) + bias[o];
            }
    }
}
}
