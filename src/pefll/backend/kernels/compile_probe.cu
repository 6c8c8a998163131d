// Tests whether CUDA C++ compiles here: the compiler may be missing, or the card too old for `mma`.

extern "C" __global__ void compile_probe(float* x) {
    const unsigned a[4] = {}, b[2] = {};
    mma(x, a, b);
}
