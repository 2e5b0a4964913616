// Placed before `gemv` and `gemm_rows`, in which a work-item computes whole rows: products of four weights and four
// activations.
//
// BY_FLOATS  with floats: they hold integers below 2^24 exactly, so the sum is the same in any order. For devices whose
//            compilers optimise floats better than bytes.
// SUBGROUPS  all work-items of a work-group need the same words of activations: each lane reads one of a block's eight
//            and broadcasts it, which takes subgroups of at least eight lanes. Otherwise every work-item reads all.

#ifdef BY_FLOATS
typedef Floats Sums;
#else
typedef Ints Sums;
#endif

#ifdef SUBGROUPS
#ifdef cl_khr_subgroups
#pragma OPENCL EXTENSION cl_khr_subgroups : enable
#endif
#ifdef cl_intel_subgroups
#pragma OPENCL EXTENSION cl_intel_subgroups : enable
#endif
#define ACTS_OF_LANE(words) (words)[get_sub_group_local_id() % 8]
#define ACT(of_lane, words, v) sub_group_broadcast(of_lane, v)
#else
#define ACTS_OF_LANE(words) 0
#define ACT(of_lane, words, v) (words)[v]
#endif

// Byte k of the rows' words as a float, minus W_ZERO.
#define WEIGHT(bytes, k) (TO_FLOATS((bytes) >> (uint)(8 * (k)) & 0xffu) - (float)W_ZERO)

// Sum of a block from the sums of its halves; `low` is the sum of both if the halves have no scales of their own.
Floats sum_of_block(Sums low, Sums high, int2 of_acts, const __global uchar *of_group, int b, int at) {
#ifndef BY_FLOATS
#if W_HALF_SCALES
    low -= W_ZERO * of_acts.x;
    high -= W_ZERO * of_acts.y;
#else
    low -= W_ZERO * (of_acts.x + of_acts.y);
#endif
#endif
#if W_HALF_SCALES
    return ADD_HALVES(TO_FLOATS(low), TO_FLOATS(high), load_half_scale(of_group, b, at, 0),
                      load_half_scale(of_group, b, at, 1));
#else
    return TO_FLOATS(low);
#endif
}
