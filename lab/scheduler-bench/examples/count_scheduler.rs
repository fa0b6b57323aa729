//! Runs the scheduler with a fixed number of requests, for `valgrind --tool=callgrind` and
//! `--tool=cachegrind`. Prints the number of allocations.
//!
//! ```text
//! cargo build --profile ci -p downbeat-scheduler-bench --example count_scheduler
//! valgrind --tool=callgrind target/ci/examples/count_scheduler --policy adaptive --drop adaptive --load 0.3 --requests 100000
//! ```
//!
//! Run it with N and with 2 N requests. The difference divided by N is the cost of a request, with
//! its drawing. `--drawn` counts the drawing alone. The gate counts requests that go through the
//! driver.

use std::alloc::System;
use std::hint::black_box;

use anyhow::Result;
use clap::Parser;
use downbeat_scheduler_bench::allocations::{Counter, CountingAllocator};
use downbeat_scheduler_bench::{CountedScheduler, SchedulerArgs, workload};

#[global_allocator]
static ALLOCATOR: CountingAllocator<System> = CountingAllocator::new(System);

#[derive(Parser)]
struct Args {
    #[command(flatten)]
    scheduler: SchedulerArgs,
    /// Requests after the warm-up.
    #[arg(long, value_name = "N")]
    requests: u64,
    /// Only draw the requests.
    #[arg(long)]
    drawn: bool,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let workload = workload(&args.scheduler)?;
    let counter;
    if args.drawn {
        let mut requests = workload.requests();
        counter = Counter::start();
        for _ in 0..args.requests {
            black_box(requests.draw());
        }
    } else {
        let mut scheduler = CountedScheduler::new(&workload);
        counter = Counter::start();
        scheduler.serve(args.requests)?;
    }
    let allocations = counter.map_or(0, Counter::stop);
    println!("{} requests, {allocations} allocations", args.requests);
    Ok(())
}
