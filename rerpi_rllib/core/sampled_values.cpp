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
enum Kind { NORM_TANH, ELU, BLOCK_NORM, BLOCK_WIDEN, BLOCK_NARROW, LAST_NORM };
enum Activation { NONE, BY_ELU, BY_RELU, BY_TANH };

static inline Vector load(const float* from) {
    Vector values;
    std::memcpy(&values, from, sizeof values);
    return values;
}

static inline void store(float* to, Vector values) { std::memcpy(to, &values, sizeof values); }
static inline Vector all(float value) { return value - Vector{}; }
// What is not a number stays so if it is the second argument.
static inline Vector smaller(Vector a, Vector b) { return a < b ? a : b; }
static inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }

static inline float total(Vector values) {
    float sum = 0.0f;
    for (int lane = 0; lane < LANES; lane++) sum += values[lane];
    return sum;
}

// exp(x) = 2^n exp(r) with |r| <= ln(2) / 2, and exp(r) by its series to the sixth order.
static inline Vector exponential(Vector x) {
    x = larger(all(-87.0f), smaller(all(88.0f), x));
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
    if (activation == BY_ELU) return larger(exponential(smaller(all(0.0f), x)) - 1.0f, x);
    if (activation == BY_RELU) return larger(all(0.0f), x);
    if (activation == BY_TANH) return 1.0f - 2.0f / (exponential(x + x) + 1.0f);
    return x;
}

static inline int padded(int size, int unit) { return (size + unit - 1) / unit * unit; }

// out = activation(in W + bias), or out += in W + bias. `rows` is a multiple of ROWS.
template <Activation activation, bool add>
static void product(const Step& step, const float* in, float* out, size_t stride, int rows) {
    for (int column = 0; column < step.outputs; column += PANEL)
        for (int k = 0; k < step.inputs; k += DEPTH) {
            const int depth = std::min(DEPTH, step.inputs - k);
            const float* weights = step.weight + (size_t)column * step.inputs + k * PANEL;
            const bool is_first = k == 0, is_last = k + depth == step.inputs;
            for (int row = 0; row < rows; row += ROWS) {
                const float* inputs = in + row * stride + k;
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
                            sums[i][j] += inputs[i * stride + d] * w[j];
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

// Layer normalisation of each row. What is behind the last number of a row is set to zero.
template <Activation activation>
static void normalize(const Step& step, const float* in, float* out, size_t stride, int rows) {
    const int size = step.inputs, whole = size / LANES * LANES;
    for (int row = 0; row < rows; row++, in += stride, out += stride) {
        Vector sum{}, squares{};
        for (int c = 0; c < whole; c += LANES) sum += load(in + c);
        float mean = total(sum);
        for (int c = whole; c < size; c++) mean += in[c];
        mean /= size;
        for (int c = 0; c < whole; c += LANES) {
            const Vector distance = load(in + c) - mean;
            squares += distance * distance;
        }
        float variance = total(squares);
        for (int c = whole; c < size; c++) variance += (in[c] - mean) * (in[c] - mean);
        const float scale = 1.0f / std::sqrt(variance / size + step.epsilon);
        // Weight and bias are zero there.
        for (int c = 0; c < padded(size, PANEL); c += LANES) {
            const Vector normal = (load(in + c) - mean) * scale;
            store(out + c, activate<activation>(normal * load(step.weight + c) + load(step.bias + c)));
        }
    }
}

extern "C" {

int panel() { return PANEL; }

// How many floats `values` needs as scratch, where no layer is wider.
long scratch_size(int widest) { return 3L * TILE * (padded(widest, PANEL) + GAP); }

// Computes outputs [rows, size] from the row `begin` up to `end`.
//
// A row is a state and an action: `actions` [rows, action_size], and the state's part of the first
// layer `states` [batch, hidden], which starts again after `batch` rows. `first` [action_size,
// hidden padded to panels] is the action's part. Then come the steps, of which there is at least
// one, and `weight` [size, last hidden padded] and `bias` [size] of the output. `scratch` holds finite numbers.
void values(const float* states, long batch, int hidden, const float* actions, int action_size,
            const float* first, const Step* steps, int num_steps, int widest, const float* weight,
            const float* bias, int size, long begin, long end, float* scratch, float* out) {
    const size_t stride = padded(widest, PANEL) + GAP;
    const int width = padded(hidden, PANEL), last = padded(steps[num_steps - 1].outputs, PANEL);
    float *x = scratch, *y = x + TILE * stride, *z = y + TILE * stride;
    for (long start = begin; start < end; start += TILE) {
        const int used = (int)std::min<long>(TILE, end - start), rows = padded(used, ROWS);
        for (int row = 0; row < used; row++) {
            const float* state = states + (start + row) % batch * hidden;
            const float* action = actions + (start + row) * action_size;
            float* to = x + row * stride;
            std::memcpy(to, state, hidden * sizeof(float));
            std::fill(to + hidden, to + width, 0.0f);
            for (int c = 0; c < width; c += LANES) {
                Vector sum = load(to + c);
                for (int d = 0; d < action_size; d++) sum += action[d] * load(first + d * width + c);
                store(to + c, sum);
            }
        }
        for (int index = 0; index < num_steps; index++) {
            const Step& step = steps[index];
            switch (step.kind) {
                case NORM_TANH: normalize<BY_TANH>(step, x, x, stride, used); break;
                case ELU:
                    product<BY_ELU, false>(step, x, y, stride, rows);
                    std::swap(x, y);
                    break;
                case BLOCK_NORM: normalize<NONE>(step, x, y, stride, used); break;
                case BLOCK_WIDEN: product<BY_RELU, false>(step, y, z, stride, rows); break;
                case BLOCK_NARROW: product<NONE, true>(step, z, x, stride, rows); break;
                case LAST_NORM: normalize<NONE>(step, x, x, stride, used); break;
            }
        }
        for (int row = 0; row < used; row++)
            for (int o = 0; o < size; o++) {
                Vector sum{};
                for (int c = 0; c < last; c += LANES)
                    sum += load(x + row * stride + c) * load(weight + (size_t)o * last + c);
                out[(start + row) * size + o] = total(sum) + bias[o];
            }
    }
}
}
