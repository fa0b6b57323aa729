//! libFuzzer on [`downbeat_fuzz::workload`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| downbeat_fuzz::workload(data));
