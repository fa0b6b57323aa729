//! Services that the tests of the frontends share.

pub mod echo_service;
pub mod memory_service;
pub mod repeat;
pub mod shared_object;

pub use memory_service::MemoryService;

/// The elements of a `BYTES` tensor.
pub fn strings(mut data: &[u8]) -> Vec<String> {
    let mut strings = Vec::new();
    while let Some((length, rest)) = data.split_first_chunk::<4>() {
        let (string, rest) = rest.split_at(u32::from_le_bytes(*length) as usize);
        strings.push(String::from_utf8(string.to_vec()).unwrap());
        data = rest;
    }
    assert!(data.is_empty(), "left over after the last element");
    strings
}
