//! Stored rows and what the packed layout makes of them.

use super::*;
use crate::quant::matrix::QuantMatrix;
use files::blocks::BlockQ4;
use files::blocks::gguf::decode_values;
use files::mapped::AlignedBytes;

/// Bytes without a pattern, of which no f16 is infinite.
fn bytes(len: usize, seed: u32) -> Vec<u8> {
    let mut state = seed;
    let mut byte = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8 & 0xbf
    };
    (0..len).map(|_| byte()).collect()
}

#[test]
fn packed_rows_hold_the_values_of_the_file() {
    const COLS: usize = 512;
    for format in Format::ALL {
        let block = format.block_type();
        let (quants, scales) = format.group_bytes(COLS);
        let (mut quants, mut scales) =
            (AlignedBytes::zeroed(quants).unwrap(), AlignedBytes::zeroed(scales).unwrap());
        let stored = |lane| bytes(COLS / block.values_per_block() * block.bytes_per_block(), lane as u32 + 1);
        for lane in 0..GROUP_ROWS {
            let planes = (quants.as_mut_slice(), scales.as_mut_slice());
            assert!(format.put_row(planes.0, planes.1, lane, &stored(lane)), "{format:?}");
        }
        let matrix = QuantMatrix::<GROUP_ROWS, COLS>::new(format, quants.freeze(), scales.freeze());
        let matrix = matrix.expect("planes of these lengths");
        for row in 0..GROUP_ROWS {
            let (mut found, mut want) = ([0.0; COLS], [0.0; COLS]);
            matrix.decode_row(row, &mut found);
            decode_values(block, &stored(row), &mut want);
            assert_eq!(found.map(f32::to_bits), want.map(f32::to_bits), "{format:?} row {row}");
        }
    }
}

#[test]
fn a_scale_that_is_not_finite_is_seen() {
    // All scales of NVFP4 are finite.
    for format in Format::ALL.into_iter().filter(|format| *format != Format::NVFP4) {
        let block = format.block_type();
        let (quants, scales) = format.group_bytes(256);
        for blocks in [0, 256 / block.values_per_block() - 1] {
            let mut row = bytes(256 / block.values_per_block() * block.bytes_per_block(), 7);
            let d = match format {
                Format::Q6_K => 208,
                Format::Q2_K => 82,
                Format::Q3_K => 108,
                Format::TQ1_0 => 52,
                Format::TQ2_0 => 64,
                _ => 0,
            };
            let at = blocks * block.bytes_per_block() + d;
            match format {
                Format::MXFP4 => row[at] = 253,
                // All nibbles of the scale are 15.
                Format::IQ1_M => row[at + 48..at + 56].fill(0xff),
                _ => row[at..at + 2].copy_from_slice(&f16::NAN.to_le_bytes()),
            }
            let (mut quants, mut scales) = (vec![0; quants], vec![0; scales]);
            assert!(!format.put_row(&mut quants, &mut scales, 3, &row), "{format:?}");
        }
    }
}

#[test]
fn nibbles_and_scales_of_q4_0_lie_where_the_layout_says() {
    const BLOCKS: usize = 3;
    let (quants, scales) = Format::Q4_0.group_bytes(BLOCKS * BLOCK);
    let (mut quants, mut scales) = (vec![Format::Q4_0.padding_byte(); quants], vec![0; scales]);
    let stored = |lane| bytes(BLOCKS * BlockQ4::BYTES, lane as u32 + 1);
    for lane in 0..GROUP_ROWS {
        assert!(Format::Q4_0.put_row(&mut quants, &mut scales, lane, &stored(lane)));
    }
    for lane in 0..GROUP_ROWS {
        for (b, stored) in stored(lane).as_chunks::<{ BlockQ4::BYTES }>().0.iter().enumerate() {
            assert_eq!(scales[b * 32 + 2 * lane..][..2], stored[..2]);
            let block = BlockQ4::from_bytes(stored);
            for column in 0..BLOCK {
                let (v, k) = (column % 16 / 4, column % 4);
                let packed = quants[b * 256 + v * 64 + lane * 4 + k];
                let nibble = if column < 16 { packed & 15 } else { packed >> 4 };
                assert_eq!(nibble, block.nibble_at(column), "row {lane}, block {b}, column {column}");
            }
        }
    }
}
