// The kernel that copies runs, as PTX that every driver since CUDA 11 compiles for its device.
#pragma once

namespace lmcache {

inline constexpr const char* kCopyKernelName = "lmcache_copy_runs";
inline constexpr const char* kCopyKernelPtx = R"ptx(
.version 7.0
.target sm_70
.address_size 64

// Run r is 24 bytes at runs + 24 r: source, destination, size in bytes, all multiples of 16. A block of threads takes
// runs blockIdx.x, blockIdx.x + gridDim.x, ...
.visible .entry lmcache_copy_runs(.param .u64 runs, .param .u32 count)
{
    .reg .pred %p<4>;
    .reg .b32 %r<24>;
    .reg .b64 %d<16>;

    ld.param.u64 %d0, [runs];
    ld.param.u32 %r0, [count];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %nctaid.x;
    mov.u32 %r3, %tid.x;
    mov.u32 %r4, %ntid.x;
    mul.wide.u32 %d1, %r3, 16;
    mul.wide.u32 %d2, %r4, 16;
    shl.b64 %d3, %d2, 1;
    add.u64 %d13, %d3, %d2;
    shl.b64 %d14, %d2, 2;
NEXT_RUN:
    setp.ge.u32 %p0, %r1, %r0;
    @%p0 bra DONE;
    mul.wide.u32 %d4, %r1, 24;
    add.u64 %d4, %d0, %d4;
    ld.volatile.global.u64 %d5, [%d4];
    ld.volatile.global.u64 %d6, [%d4+8];
    ld.volatile.global.u64 %d7, [%d4+16];
    mov.u64 %d8, %d1;
FOUR:
    add.u64 %d9, %d8, %d13;
    setp.ge.u64 %p1, %d9, %d7;
    @%p1 bra ONE;
    add.u64 %d10, %d5, %d8;
    add.u64 %d11, %d10, %d2;
    add.u64 %d12, %d10, %d3;
    add.u64 %d15, %d10, %d13;
    ld.global.cv.v4.u32 {%r5, %r6, %r7, %r8}, [%d10];
    ld.global.cv.v4.u32 {%r9, %r10, %r11, %r12}, [%d11];
    ld.global.cv.v4.u32 {%r13, %r14, %r15, %r16}, [%d12];
    ld.global.cv.v4.u32 {%r17, %r18, %r19, %r20}, [%d15];
    add.u64 %d10, %d6, %d8;
    add.u64 %d11, %d10, %d2;
    add.u64 %d12, %d10, %d3;
    add.u64 %d15, %d10, %d13;
    st.global.cs.v4.u32 [%d10], {%r5, %r6, %r7, %r8};
    st.global.cs.v4.u32 [%d11], {%r9, %r10, %r11, %r12};
    st.global.cs.v4.u32 [%d12], {%r13, %r14, %r15, %r16};
    st.global.cs.v4.u32 [%d15], {%r17, %r18, %r19, %r20};
    add.u64 %d8, %d8, %d14;
    bra FOUR;
ONE:
    setp.ge.u64 %p2, %d8, %d7;
    @%p2 bra RUN_DONE;
    add.u64 %d10, %d5, %d8;
    add.u64 %d11, %d6, %d8;
    ld.global.cv.v4.u32 {%r5, %r6, %r7, %r8}, [%d10];
    st.global.cs.v4.u32 [%d11], {%r5, %r6, %r7, %r8};
    add.u64 %d8, %d8, %d2;
    bra ONE;
RUN_DONE:
    add.u32 %r1, %r1, %r2;
    bra NEXT_RUN;
DONE:
    ret;
}
)ptx";

}  // namespace lmcache
