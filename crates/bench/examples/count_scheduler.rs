//! The scheduler by a number of requests: a program for `valgrind --tool=callgrind` and `--tool=cachegrind`, which prints how often it allocated.
//!
//! ```text
//! cargo build --profile ci -p downbeat-bench --example count_scheduler
//! valgrind --tool=callgrind target/ci/examples/count_scheduler --policy adaptive --drop adaptive --load 0.3 --requests 100000
//! ```
//!
//! Run it with N and with 2 N requests: the difference by N is what a request costs. `--posted 1` goes by the driver's mailboxes, `--drawn` only draws
//! the requests, which the other two do as well.

use std::alloc::System;
use std::hint::black_box;

use anyhow::Result;
use clap::Parser;
use downbeat_bench::allocations::{Counter, CountingAllocator};
use downbeat_bench::scheduler::{CountedCluster, CountedScheduler, SchedulerArgs, workload};

#[global_allocator]
static ALLOCATOR: CountingAllocator<System> = CountingAllocator::new(System);

#[derive(Parser)]
struct Args {
    #[command(flatten)]
    scheduler: SchedulerArgs,
    /// Requests after the warm-up.
    #[arg(long, value_name = "N")]
    requests: u64,
    /// Post the requests to the driver's cluster, with the models' queues in so many shards.
    #[arg(long, value_name = "SHARDS")]
    posted: Option<usize>,
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
    } else if let Some(shards) = args.posted {
        let mut cluster = CountedCluster::new(&workload, shards)?;
        counter = Counter::start();
        cluster.serve(args.requests)?;
    } else {
        let mut scheduler = CountedScheduler::new(&workload);
        counter = Counter::start();
        scheduler.serve(args.requests)?;
    }
    let allocations = counter.map_or(0, Counter::stop);
    println!("{} requests, {allocations} allocations", args.requests);
    Ok(())
}
