//! libFuzzer on [`downbeat_fuzz::etcd_answer`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| downbeat_fuzz::etcd_answer(data));
