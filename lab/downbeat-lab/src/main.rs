//! The program `downbeat-lab`.

use std::process::ExitCode;

use downbeat_bench::allocator::Mimalloc;
use downbeat_scheduler_bench::allocations::CountingAllocator;

/// The server's allocator, counted: `downbeat-lab scheduler` reports the scheduler's allocations.
#[global_allocator]
static ALLOCATOR: CountingAllocator<Mimalloc> = CountingAllocator::new(Mimalloc);

fn main() -> ExitCode {
    downbeat_lab::main()
}
