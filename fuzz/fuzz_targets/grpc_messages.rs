//! libFuzzer on [`downbeat_fuzz::grpc_messages`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| downbeat_fuzz::grpc_messages(data));
