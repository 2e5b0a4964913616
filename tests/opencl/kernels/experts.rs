//! Mixtures of experts against plain loops: the choice of experts, products with the chosen ones, and their sum.

use super::products::{GEMV, normed, packed, q4_options, quantised, silu, words};
use super::{Dims, SMALL, buffer, floats, kernel, read, same, state};
use crate::device;
use crate::support::random::Random;
use antigravity::opencl::Device;
use files::blocks::BLOCK;
use numeric::simd::recurrent::apply_sigmoid;
use numeric::simd::{Isa, ops};

const EXPERTS: &str = include_str!("../../../kernels/experts.cl");

/// Switches of a router.
struct Routing {
    softmax: bool,
    renormalised: bool,
    expert_bias: bool,
    choice_bias: bool,
}

/// Options of a mixture of `count` experts, of which a token uses `used`, without a bias or a shared one.
fn options(count: usize, used: usize, more: &str) -> String {
    format!("-DEXPERTS={count} -DUSED={used} -DSCORES={count} -DSHARED_GATE_AT=0 -DSHARED_EXPERT=0 {more}")
}

/// Experts and weights of a token, by sorting.
fn choice(scores: &[f32], [bias, choice_bias]: [&[f32]; 2], used: usize, how: &Routing) -> Vec<(usize, f32)> {
    let mut weights = scores.to_vec();
    if how.expert_bias {
        weights.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
    }
    if !how.softmax {
        apply_sigmoid(Isa::Scalar, &mut weights);
    }
    let mut ranks = weights.clone();
    if how.choice_bias {
        ranks.iter_mut().zip(choice_bias).for_each(|(x, b)| *x += b);
    }
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| ranks[b].partial_cmp(&ranks[a]).unwrap()); // stable: of equal ones the first
    if how.softmax {
        let largest = ranks[order[0]];
        weights.iter_mut().for_each(|x| *x -= largest);
        ops::exp_in_place(Isa::Scalar, &mut weights);
    }
    order.truncate(used);
    order.sort();
    let of_used: Vec<f32> = order.iter().map(|&e| weights[e]).collect();
    let divisor = match (how.softmax, how.renormalised) {
        (true, true) => ops::sum(Isa::Scalar, &of_used),
        (true, false) => ops::sum(Isa::Scalar, &weights),
        (false, true) => ops::sum(Isa::Scalar, &of_used) + 1e-6,
        (false, false) => 1.0,
    };
    order.into_iter().zip(of_used).map(|(e, x)| (e, x / divisor * 1.5)).collect()
}

/// Scores of few values, so that many are equal.
#[test]
fn the_choice_of_experts_has_the_cpus_bits() {
    let Some(device) = device::device() else { return };
    let (count, used, n, r) = (37, 19, 4, &mut Random(7));
    let scores: Vec<f32> = r.floats(n * count).iter().map(|x| (x * 4.0).round() / 2.0).collect();
    let biases: Vec<f32> = r.floats(2 * count).iter().map(|x| (x * 2.0).round() / 4.0).collect();
    for (softmax, renormalised, expert_bias, choice_bias) in [
        (true, true, false, false),
        (true, false, false, false),
        (true, true, true, false),
        (false, true, false, true),
        (false, false, false, false),
    ] {
        let how = Routing { softmax, renormalised, expert_bias, choice_bias };
        let flags = [softmax, renormalised, expert_bias, choice_bias].map(usize::from);
        let [s, r, e, c] = flags;
        let more = format!(
            "-DCHOOSE -DSOFTMAX={s} -DRENORMALISED={r} -DEXPERT_BIAS={e} -DCHOICE_BIAS={c} -DEXPERT_SCALE=1.5f"
        );
        let (from, chosen) = (floats(&device, &scores), buffer(&device, &vec![0; 8 * n * used]));
        let bias = floats(&device, &biases[if expert_bias { 0 } else { count }..]);
        let options = SMALL.options(32, &options(count, used, &more));
        let k = kernel(&device, ("choose_experts", EXPERTS), &options, &[&from, &bias, &chosen]);
        device.launch(&k, &[32 * n], &[32]).unwrap();
        let expected: Vec<f32> = scores
            .chunks(count)
            .flat_map(|scores| choice(scores, [&biases[..count], &biases[count..]], used, &how))
            .flat_map(|(e, weight)| [f32::from_bits(e as u32), weight])
            .collect();
        same(&format!("{flags:?}"), &read(&chosen), &expected);
    }
}

/// Gates and ups of chosen experts, of which a buffer has all but the first, then the downs of all, and their sum.
#[test]
fn products_with_experts_have_the_cpus_bits() {
    let Some(device) = device::device() else { return };
    let (Dims { dim, ffn, head_dim, .. }, r) = (SMALL, &mut Random(8));
    let choices = [(1, 0.25f32), (2, 0.5), (0, 0.125), (2, 1.5)];
    let (count, used, n) = (3, 2, choices.len() / 2);
    let of_expert = |r: &mut Random| [packed(r, ffn, dim), packed(r, ffn, dim), packed(r, dim, ffn)];
    let experts: Vec<_> = (0..count).map(|_| of_expert(r)).collect();
    let (x, w) = ((0..n).map(|_| r.floats(dim + head_dim)).collect::<Vec<_>>(), r.floats(dim));
    let table: Vec<u8> = choices
        .iter()
        .flat_map(|(e, weight): &(u32, f32)| [*e, weight.to_bits()])
        .flat_map(u32::to_le_bytes)
        .collect();
    let (s, norm, table) =
        (floats(&device, &state([0, 0], &x)), floats(&device, &w), buffer(&device, &table));
    let launch = |text, more: String, (cols, groups): (usize, [i32; 2]), args: &[_]| {
        let more = options(count, used, &format!("-DEXPERT_BIAS=0 -DPRODUCTS={used} -DCHOSEN {more}"));
        let options = SMALL.options(64, &format!("{more} -DCOLS={cols}{}", q4_options(cols)));
        let mut k = kernel(&device, text, &options, args);
        k.set_ints(args.len(), &groups).unwrap();
        device.launch(&k, &[64, choices.len()], &[64, 1]).unwrap();
    };
    // Of a matrix, the groups of all experts from `first` on.
    let planes = |first: usize, part: usize| {
        let of = &experts[first..];
        let plane = |quants: bool| {
            of.iter().flat_map(move |e| if quants { &e[part].quants } else { &e[part].scales }.clone())
        };
        [plane(true).collect::<Vec<u8>>(), plane(false).collect()]
    };
    let ([gate, gate_scales], [up, up_scales]) = (planes(1, 0), planes(1, 1));
    let (quants, scales) =
        (buffer(&device, &[gate, up].concat()), buffer(&device, &[gate_scales, up_scales].concat()));
    let (acts, act_scales) = (
        buffer(&device, &vec![0; choices.len() * ffn]),
        floats(&device, &vec![0.0; choices.len() * ffn / BLOCK]),
    );
    let groups = (ffn / 16) as i32;
    launch(
        ("gemv", GEMV),
        format!("-DSTEP_GATE_UP -DDOWN_QUANTISED -DROWS={ffn} -DTILE_GROUPS=2 -DSLICES=4 -DPASS=2"),
        (dim, [groups, 2 * groups]),
        &[&quants, &scales, &s, &norm, &norm, &acts, &act_scales, &table],
    );
    let inputs: Vec<_> = choices
        .iter()
        .enumerate()
        .map(|(i, (e, _))| {
            let (input, [gate, up, _]) = (quantised(&normed(&x[i / used][..dim], &w)), &experts[*e as usize]);
            quantised(&silu(&gate.times(&input), &up.times(&input)))
        })
        .collect();
    let mut found = vec![0; choices.len() * ffn];
    acts.read(0, &mut found).unwrap();
    let mut expected = words(&inputs.concat());
    expected[2 * ffn..3 * ffn].fill(0); // the first expert's, who is not in the buffer
    assert_eq!(found, expected);

    acts.write(0, &words(&inputs.concat())).unwrap();
    let d: Vec<f32> = inputs.iter().flatten().map(|a| a.d).collect();
    let [down, down_scales] = planes(0, 2).map(|plane| buffer(&device, &plane));
    let (act_scales, out) = (floats(&device, &d), floats(&device, &vec![0.0; choices.len() * dim]));
    let args = [&down, &down_scales, &s, &acts, &act_scales, &out, &out, &table];
    let groups = (count * dim / 16) as i32;
    launch(
        ("gemv", GEMV),
        format!("-DSTEP_DOWN -DROWS={dim} -DTILE_GROUPS=1 -DSLICES=16 -DPASS=2"),
        (ffn, [0, groups]),
        &args,
    );
    let outputs: Vec<_> =
        choices.iter().zip(&inputs).map(|((e, _), input)| experts[*e as usize][2].times(input)).collect();
    same("down", &read(&out), &outputs.concat());
    sum(&device, &x, &choices, &outputs);
}

/// Sum of the outputs, on top of the residual.
fn sum(device: &Device, x: &[Vec<f32>], choices: &[(u32, f32)], outputs: &[Vec<f32>]) {
    let (Dims { dim, .. }, used) = (SMALL, choices.len() / x.len());
    let table: Vec<f32> = choices.iter().flat_map(|(e, weight)| [f32::from_bits(*e), *weight]).collect();
    let (s, table, out) =
        (floats(device, &state([0, 0], x)), floats(device, &table), floats(device, &outputs.concat()));
    let options = SMALL.options(64, &options(3, used, ""));
    let args = [&s, &out, &table, &out, &out, &out, &out];
    let k = kernel(device, ("add_experts", EXPERTS), &options, &args);
    device.launch(&k, &[dim.next_multiple_of(64), x.len()], &[64, 1]).unwrap();
    let found = read(&s);
    for (t, x) in x.iter().enumerate() {
        let of_token = || choices[t * used..][..used].iter().zip(&outputs[t * used..]);
        let y = |i: usize| of_token().fold(0.0f32, |sum, ((_, weight), out)| out[i].mul_add(*weight, sum));
        let expected: Vec<f32> = (0..dim).map(|i| x[i] + y(i)).collect();
        same("sum", &found[16 + t * x.len()..][..dim], &expected);
    }
}
