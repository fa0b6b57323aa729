//! Tensor memory and `BYTES` elements.

use bytes::Bytes;
use downbeat_engine::Buffer;
use downbeat_engine::strings;
use downbeat_engine::tensor::ALIGNMENT;

use crate::support::Random;

#[test]
fn grows_like_a_vector_and_stays_aligned() {
    let mut random = Random::new("grows_like_a_vector");
    for _ in 0..50 {
        let mut buffer = Buffer::with_capacity(random.below(300) as usize);
        let mut expected: Vec<u8> = Vec::new();
        for _ in 0..random.below(20) {
            let piece: Vec<u8> = (0..random.below(200)).map(|_| random.bits() as u8).collect();
            buffer.extend_from_slice(&piece);
            expected.extend_from_slice(&piece);
            assert_eq!(buffer.as_slice(), expected);
            assert!(buffer.as_slice().as_ptr().addr().is_multiple_of(ALIGNMENT));
        }
        let len = random.below(400) as usize;
        buffer.resize(len, 9);
        expected.resize(len, 9);
        assert_eq!(buffer.into_bytes(), expected);
    }
}

#[test]
fn becomes_bytes_without_a_copy() {
    let buffer = Buffer::from(&[1, 2, 3][..]);
    let start = buffer.as_slice().as_ptr();
    let bytes = buffer.into_bytes();
    assert_eq!(bytes.as_ptr(), start);
    let again = Buffer::from_bytes(bytes.clone()).into_bytes();
    assert_eq!(again.as_ptr(), start);
}

#[test]
fn shared_memory_is_copied_before_it_is_written() {
    let bytes = Bytes::from_static(b"abc");
    let mut buffer = Buffer::from_bytes(bytes.clone());
    buffer.extend_from_slice(b"d");
    buffer.as_mut_slice()[0] = b'x';
    assert_eq!((buffer.as_slice(), &bytes[..]), (&b"xbcd"[..], &b"abc"[..]));
}

#[test]
fn nothing_is_aligned_too() {
    assert!(Buffer::new().as_slice().as_ptr().addr().is_multiple_of(ALIGNMENT));
    assert_eq!(Buffer::zeroed(3).unwrap().as_slice(), [0; 3]);
    assert!(Buffer::new().into_bytes().is_empty());
}

#[test]
fn strings_there_and_back() {
    let mut buffer = Buffer::new();
    let elements: [&[u8]; 4] = [b"one", b"", b"\0\xff", b"four"];
    elements.iter().for_each(|e| strings::push(&mut buffer, e).expect("short"));
    let back: Result<Vec<_>, _> = strings::split(buffer.as_slice()).collect();
    assert_eq!(back.expect("whole"), elements);
    let cut = &buffer.as_slice()[..buffer.len() - 1];
    let error = strings::split(cut).find_map(Result::err).expect("cut short");
    assert_eq!((error.element, error.said, error.left), (3, 4, 3));
}
