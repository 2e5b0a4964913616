//! Buffers, views, programs, kernels and launches.

use crate::device::device;
use antigravity::opencl::{Access, FailureKind, Place, Program, Source, StagingBuffer};
use opencl_runtime::buffer::{HostFloatsPool, MapFor};
use std::panic::{AssertUnwindSafe, catch_unwind};

const ADD: &str = "
    kernel void add(global const float *a, global const float *b, global float *sum, int n, int2 scale) {
        int i = get_global_id(0);
        if (i < n) sum[i] = scale.x / (float)scale.y * (a[i] + b[i]);
    }
    kernel void turn(global const int *in, global int *out) {
        local int group[8];
        int l = get_local_id(0), size = get_local_size(0);
        group[l] = in[get_global_id(0)];
        barrier(CLK_LOCAL_MEM_FENCE);
        out[get_global_id(0)] = group[size - 1 - l];
    }
    kernel void places(global int *out) {
        size_t x = get_global_id(0), y = get_global_id(1), z = get_global_id(2);
        out[(z * get_global_size(1) + y) * get_global_size(0) + x] = (int)(100 * z + 10 * y + x);
    }";

const SOURCE: Source<'static> = Source { name: "add", text: ADD, options: "" };

fn le(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

fn panics(f: impl FnOnce()) -> String {
    let payload = catch_unwind(AssertUnwindSafe(f)).expect_err("it panics");
    payload.downcast::<String>().map_or_else(|p| p.downcast::<&str>().unwrap().to_string(), |s| *s)
}

#[test]
fn a_kernel_computes_from_its_arguments() {
    let Some(device) = device() else { return };
    let program = Program::build(&device, &SOURCE).unwrap();
    for n in [1usize, 3, 64, 257] {
        let a = device.upload_buffer(&le((0..n).map(|i| i as f32))).unwrap();
        let b = device.upload_buffer(&le((0..n).map(|i| 0.5 - i as f32 / 2.0))).unwrap();
        let sum = device.allocate_buffer(4 * n, Access::ReadWrite, Place::Device).unwrap();
        let mut add = program.create_kernel("add").unwrap();
        add.set_buffer(0, &a).unwrap().set_buffer(1, &b).unwrap().set_buffer(2, &sum).unwrap();
        add.set_int(3, n as i32).unwrap().set_ints(4, &[2, 1]).unwrap();
        // The kernel keeps its arguments.
        drop((a, b));
        let before = device.launch_count();
        device.launch(&add, &[n.next_multiple_of(32)], &[32]).unwrap();
        let mut out = vec![0; 4 * n];
        sum.read(0, &mut out).unwrap();
        assert_eq!(out, le((0..n).map(|i| 1.0 + i as f32)));
        assert_eq!(device.launch_count() - before, 1);
    }
}

#[test]
fn local_memory_and_three_dimensions_are_where_they_were_asked_for() {
    let Some(device) = device() else { return };
    let program = Program::build(&device, &SOURCE).unwrap();
    let ints = |n: i32| (0..n).flat_map(i32::to_le_bytes).collect::<Vec<u8>>();
    let input = device.upload_buffer(&ints(16)).unwrap();
    let out = device.allocate_buffer(4 * 24, Access::ReadWrite, Place::Device).unwrap();
    let mut turn = program.create_kernel("turn").unwrap();
    turn.set_buffer(0, &input).unwrap().set_buffer(1, &out).unwrap();
    device.launch(&turn, &[16], &[8]).unwrap();
    let mut bytes = vec![0; 64];
    out.read(0, &mut bytes).unwrap();
    let expected = [7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8i32];
    assert_eq!(bytes, expected.iter().flat_map(|i| i.to_le_bytes()).collect::<Vec<u8>>());

    let mut places = program.create_kernel("places").unwrap();
    places.set_buffer(0, &out).unwrap();
    for local in [&[][..], &[2, 3, 1]] {
        out.fill(0..96, 0).unwrap();
        device.launch(&places, &[2, 3, 4], local).unwrap();
        let mut bytes = vec![0; 96];
        out.read(0, &mut bytes).unwrap();
        let expected = (0..24).map(|i: i32| 100 * (i / 6) + 10 * (i / 2 % 3) + i % 2);
        assert_eq!(bytes, expected.flat_map(i32::to_le_bytes).collect::<Vec<u8>>());
    }
    assert!(places.max_work_group() > 0);
}

#[test]
fn odd_ranges_are_written_read_copied_and_filled() {
    let Some(device) = device() else { return };
    for place in [Place::Device, Place::HostVisible] {
        for len in [1usize, 2, 7, 63, 4097] {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 37 + 5) as u8).collect();
            let a = device.allocate_buffer(len, Access::ReadWrite, place).unwrap();
            let b = device.allocate_buffer(len, Access::ReadOnly, place).unwrap();
            a.write(0, &bytes).unwrap();
            b.fill(0..len, 9).unwrap();
            let from = len / 3;
            a.copy_to(from..len, &b, 0).unwrap();
            a.fill(from..len, 1).unwrap();
            let mut out = vec![0; len];
            b.read(0, &mut out).unwrap();
            assert_eq!(out[..len - from], bytes[from..]);
            assert!(out[len - from..].iter().all(|&x| x == 9));
            a.read(0, &mut out).unwrap();
            assert_eq!(out[..from], bytes[..from]);
            assert!(out[from..].iter().all(|&x| x == 1));
            // Nothing at the very end is nothing.
            a.write(len, &[]).unwrap();
            a.read(len, &mut []).unwrap();
            a.copy_to(len..len, &b, len).unwrap();
            a.fill(len..len, 0).unwrap();
            assert!(panics(|| a.write(len, &[1]).unwrap()).contains("bytes"));
            assert!(panics(|| a.read(1, &mut vec![0; len]).unwrap()).contains("bytes"));
            assert!(panics(|| a.fill(0..len + 1, 0).unwrap()).contains("bytes"));
            assert!(panics(|| a.copy_to(0..len, &b, 1).unwrap()).contains("bytes"));
        }
    }
}

#[test]
fn the_cpu_reads_and_writes_a_mapped_buffer() {
    let Some(device) = device() else { return };
    let program = Program::build(&device, &SOURCE).unwrap();
    let mut buffer = device.allocate_buffer(96, Access::ReadWrite, Place::HostVisible).unwrap();
    let other = buffer.clone();
    let mut places = program.create_kernel("places").unwrap();
    places.set_buffer(0, &buffer).unwrap();
    let mut view = buffer.map(0..96, MapFor::Reading).unwrap();
    assert!(
        panics(|| device.launch(&places, &[2, 3, 4], &[]).unwrap()).contains("places: argument 0 is mapped")
    );
    assert!(panics(|| other.write(0, &[1]).unwrap()).contains("mapped"));
    assert!(panics(|| other.read(0, &mut [1]).unwrap()).contains("mapped"));
    assert!(panics(|| drop(other.clone().map(0..1, MapFor::Reading))).contains("twice"));
    assert!(panics(|| view.bytes_mut()[0] = 1).contains("for reading"));
    drop(view);
    device.launch(&places, &[2, 3, 4], &[]).unwrap();
    device.finish().unwrap();
    let device_only = device.allocate_buffer(1, Access::ReadOnly, Place::Device).unwrap();
    assert!(panics(|| drop(device_only.clone().map(0..1, MapFor::Reading))).contains("host-visible"));
    assert!(panics(|| drop(device_only.clone().map_read_only())).contains("host-visible"));
}

#[test]
fn a_kernel_writes_to_host_memory_that_is_lent() {
    let Some(device) = device() else { return };
    let program = Program::build(&device, &SOURCE).unwrap();
    let mut places = program.create_kernel("places").unwrap();
    let mut lender = HostFloatsPool::default();
    let (mut one, mut other) =
        (lender.allocate_floats(&device, 24).unwrap(), lender.allocate_floats(&device, 24).unwrap());
    other.fill(7.0);
    let buffer = lender.find_buffer(&one).unwrap();
    for n in [1, 2] {
        places.set_buffer(0, &buffer).unwrap();
        device.launch(&places, &[n, 3, 4], &[]).unwrap();
        device.finish().unwrap();
        let last = 320 + n as u32 - 1;
        assert_eq!((one[0].to_bits(), one[12 * n - 1].to_bits()), (0, last));
        one.fill(1.0);
    }
    assert_eq!(*other, [7.0; 24]);
    assert!(lender.find_buffer(&one[1..]).is_none() && lender.find_buffer(&one[..23]).is_none());
    assert!(lender.find_buffer(&[0.0; 24]).is_none() && lender.find_buffer(&other).is_some());
    // No other way to it.
    assert!(panics(|| buffer.write(0, &[1]).unwrap()).contains("mapped"));
    assert!(panics(|| buffer.read(0, &mut [1]).unwrap()).contains("mapped"));
}

#[test]
fn a_frozen_buffer_is_read_by_both() {
    let Some(device) = device() else { return };
    let program = Program::build(&device, &SOURCE).unwrap();
    let bytes = le((0..64).map(|i| i as f32));
    let mut weights = device.allocate_buffer(bytes.len(), Access::ReadOnly, Place::HostVisible).unwrap();
    let mut view = weights.map(0..bytes.len(), MapFor::Writing).unwrap();
    view.bytes_mut().copy_from_slice(&bytes);
    drop(view);
    let frozen = weights.map_read_only().unwrap();
    assert_eq!(*frozen, bytes[..]);
    let sum = device.allocate_buffer(bytes.len(), Access::ReadWrite, Place::Device).unwrap();
    let mut add = program.create_kernel("add").unwrap();
    add.set_buffer(0, frozen.buffer()).unwrap().set_buffer(1, frozen.buffer()).unwrap();
    add.set_buffer(2, &sum).unwrap().set_int(3, 64).unwrap().set_ints(4, &[1, 2]).unwrap();
    device.launch(&add, &[64], &[64]).unwrap();
    let mut out = vec![0; bytes.len()];
    sum.read(0, &mut out).unwrap();
    assert_eq!(out, bytes);
    assert!(panics(|| frozen.buffer().write(0, &[1]).unwrap()).contains("mapped"));
    assert!(panics(|| drop(frozen.buffer().clone().map(0..1, MapFor::Reading))).contains("twice"));
    let again = frozen.buffer().clone().map_read_only().unwrap();
    drop(frozen);
    assert_eq!(*again, bytes[..]);
}

#[test]
fn staged_writes_arrive_in_order() {
    let Some(device) = device() else { return };
    let mut staged = StagingBuffer::new(&device, 64, Access::ReadOnly).unwrap();
    let log = device.allocate_buffer(64 * 50, Access::ReadWrite, Place::Device).unwrap();
    for i in 0..50u8 {
        staged.write(64, |bytes| bytes.fill(i)).unwrap();
        staged.buffer().copy_to(0..64, &log, 64 * usize::from(i)).unwrap();
    }
    drop(staged);
    let mut out = vec![0; 64 * 50];
    log.read(0, &mut out).unwrap();
    assert_eq!(out, (0..50u8).flat_map(|i| [i; 64]).collect::<Vec<u8>>());
}

#[test]
fn failures_name_what_failed() {
    let Some(device) = device() else { return };
    let broken =
        Source { name: "broken", text: "kernel void f(global int *p) { p[0] = missing; }", options: "" };
    let failure = Program::build(&device, &broken).err().unwrap();
    assert_eq!(failure.kind, FailureKind::Build);
    assert!(failure.message.contains("clBuildProgram of broken"), "{failure}");
    assert!(failure.message.contains("missing"), "the compiler's words: {failure}");
    assert!(failure.message.lines().count() < 20);

    let program = Program::build(&device, &SOURCE).unwrap();
    let failure = program.create_kernel("subtract").err().unwrap();
    assert_eq!(failure.kind, FailureKind::Build);
    assert!(failure.message.contains("subtract in add") && failure.message.contains("INVALID_KERNEL_NAME"));

    // What is wrong with a call that is queued, or that prepares one, loses the device: each has a new one.
    let another = || {
        let device = crate::device::device().unwrap();
        let program = Program::build(&device, &SOURCE).unwrap();
        let add = program.create_kernel("add").unwrap();
        (device, add)
    };
    let (_, mut add) = another();
    let failure = add.set_int(9, 0).err().unwrap();
    assert_eq!(failure.kind, FailureKind::InvalidCall);
    assert!(
        failure.message.contains("kernel add, argument 9") && failure.message.contains("INVALID_ARG_INDEX")
    );
    let (_, mut add) = another();
    let failure = add.set_ints(3, &[0; 16]).err().unwrap();
    assert!(failure.message.contains("kernel add, argument 3, 64 bytes"), "{failure}");
    let (device, add) = another();
    let failure = device.launch(&add, &[32], &[32]).unwrap_err();
    assert_eq!(failure.kind, FailureKind::InvalidCall);
    assert!(device.is_lost() && device.finish().unwrap_err() == failure, "no call is made any more");
    assert!(failure.message.contains("kernel add, [32] items in groups of [32]"), "{failure}");
    assert!(panics(|| device.launch(&add, &[33], &[32]).unwrap()).contains("not whole groups"));
    assert!(panics(|| device.launch(&add, &[32], &[32, 1]).unwrap()).contains("in groups of"));

    let most = usize::try_from(device.info().max_alloc).unwrap();
    let failure = device.allocate_buffer(most + 1, Access::ReadOnly, Place::Device).err().unwrap();
    assert_eq!(failure.kind, FailureKind::Memory);
}
