use std::pin::Pin;
use std::task::{Context, Waker};

use downbeat_core::Duration;
use downbeat_core::ids::BatchId;
use downbeat_host::request::batch_codec::OutputPart;
use downbeat_roles::{BatchKey, Epoch, NodeId, QueueAlias, QueueKey, ServedModel};
use tokio::io::AsyncWriteExt;

use super::*;
use crate::wire::arena::tests::both;
use crate::wire::peer_memory::PeerMemory;

fn tensors_of(sizes: &[usize]) -> Tensors {
    let part = |(place, size): (usize, &usize)| OutputPart {
        shape: vec![1, *size as i64],
        data: vec![place as u8 + 1; *size].into(),
    };
    sizes.iter().enumerate().map(part).collect()
}

fn frame(messages: Vec<Message<Tensors>>) -> Frame<Tensors> {
    let (sent, echo) = (Duration::from_millis(3), Some((Duration::from_millis(2), Duration::from_millis(1))));
    Frame { from: NodeId(7), session: 1, of: 2, first: 40, messages, ack: 9, sent, echo }
}

fn inputs(payloads: Vec<Tensors>) -> Message<Tensors> {
    let batch = BatchKey { epoch: Epoch { number: 3, rank: 1 }, batch: BatchId(5) };
    let granted = (0..).zip(payloads).map(|(number, payload)| (number, Duration::MAX, payload)).collect();
    Message::Inputs { batch, granted, gone: vec![9] }
}

/// The outbox's bytes, written in pieces of at most `most` bytes.
fn written(outbox: &mut Outbox, most: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    let all = outbox.write(|pieces| {
        let before = bytes.len();
        for piece in pieces {
            let room = most - (bytes.len() - before);
            bytes.extend_from_slice(&piece[..piece.len().min(room)]);
        }
        Ok(bytes.len() - before)
    });
    assert!(all.unwrap());
    bytes
}

async fn read(bytes: &[u8], most: u64) -> Result<Frame<Tensors>, WireError> {
    read_frame(&mut &bytes[..], &mut Vec::new(), &ReadBudget::new(most), None).await.map(Option::unwrap)
}

#[tokio::test]
async fn frames_come_as_they_were_sent_however_they_are_written() {
    let failed = Outcome::Failed { code: 3, message: "no".to_owned() };
    let answers = vec![(1, failed), (2, Outcome::Outputs(tensors_of(&[0, 100_000])))];
    let answers = Message::Answers { run: None, answers };
    let streamed = [Some(Outcome::Outputs(tensors_of(&[7000]))), None];
    let streamed = streamed.map(|answer| Message::Streamed { number: 4, is_last: answer.is_none(), answer });
    let mut messages = vec![inputs(vec![tensors_of(&[3, 5000]), tensors_of(&[])]), answers];
    messages.extend(streamed);
    let sent = [frame(messages), frame(Vec::new())];
    for most in [1, 100, 1 << 20] {
        let mut outbox = Outbox::default();
        for frame in &sent {
            outbox.put_frame(frame, None).unwrap();
        }
        let announced = outbox.bytes();
        let bytes = written(&mut outbox, most);
        assert_eq!((bytes.len(), outbox.bytes()), (announced, 0));
        let mut reader = &bytes[..];
        let mut scratch = Vec::new();
        for frame in &sent {
            assert_eq!(
                &read_frame(&mut reader, &mut scratch, &ReadBudget::new(1 << 20), None).await.unwrap().unwrap(),
                frame
            );
        }
        assert!(matches!(
            read_frame(&mut reader, &mut scratch, &ReadBudget::new(1 << 20), None).await,
            Err(WireError::Ended(_))
        ));
    }
}

#[tokio::test]
async fn what_is_too_large_or_cut_off_is_refused_before_it_is_held() {
    let mut outbox = Outbox::default();
    outbox.put_frame(&frame(vec![inputs(vec![tensors_of(&[5000, 6000])])]), None).unwrap();
    let bytes = written(&mut outbox, 1 << 20);
    assert!(matches!(read(&bytes, 10_999).await, Err(WireError::TooLarge { announced: 11_000, most: 10_999 })));
    assert!(read(&bytes, 11_000).await.is_ok());
    for end in [0, 3, 4, 7, 20, bytes.len() - 1] {
        assert!(matches!(read(&bytes[..end], 11_000).await, Err(WireError::Ended(_))), "{end}");
    }
    let head = [0xff; 8];
    assert!(matches!(read(&head, 11_000).await, Err(WireError::TooLarge { announced: 4_294_967_295, .. })));
    assert!(matches!(read(&headed(&[0xff; 8]), 11_000).await, Err(WireError::Garbled(_))));
}

/// A head as it stands on a connection.
fn headed(head: &[u8]) -> Vec<u8> {
    let (length, checksum) = ((head.len() as u32).to_le_bytes(), crc32fast::hash(head).to_le_bytes());
    [&length[..], &checksum, head].concat()
}

/// The head of a frame whose messages begin with these bytes.
fn head_of(count: usize, messages: &[u8]) -> Vec<u8> {
    let mut head = postcard::to_allocvec(&(7u64, 1u64, 2u64, 40u64, count)).unwrap();
    head.extend_from_slice(messages);
    head
}

#[tokio::test]
async fn a_frame_has_at_most_the_messages_that_a_sender_sends() {
    let leave = postcard::to_allocvec(&Message::<Tensors>::Leave).unwrap();
    let rest = postcard::to_allocvec(&(9u64, 3u64, 0u8)).unwrap();
    let of = |count: usize| headed(&[head_of(count, &leave.repeat(count)), rest.clone()].concat());
    assert_eq!(read(&of(128), 0).await.unwrap().messages, vec![Message::Leave; 128]);
    for count in [129, 8 << 20] {
        assert!(matches!(read(&of(count), 0).await, Err(WireError::Garbled(_))), "{count}");
    }
}

#[tokio::test]
async fn the_lists_of_a_frame_take_no_more_memory_than_their_budget() {
    // An empty answer takes 3 bytes of a head, and 100 bytes of memory with its list.
    let answers = |count: usize| {
        let answer = (5u64, Outcome::Outputs(tensors_of(&[])));
        frame(vec![Message::Answers { run: None, answers: vec![answer; count] }])
    };
    let head = |frame: &Frame<Tensors>| headed(&postcard::to_allocvec(frame).unwrap());
    let few = answers(100_000);
    assert_eq!(read(&head(&few), 0).await.unwrap(), few);
    assert!(matches!(read(&head(&answers(2_000_000)), 0).await, Err(WireError::Garbled(_))));
    // The list says that it is long, and nothing follows.
    let release = postcard::to_allocvec(&Message::<Tensors>::Release {
        batch: BatchKey { epoch: Epoch { number: 3, rank: 1 }, batch: BatchId(5) },
        numbers: Vec::new(),
    });
    let mut release = release.unwrap();
    release.pop();
    release.extend_from_slice(&[0xff, 0xff, 0xff, 0xff, 0x7f]);
    assert!(matches!(read(&headed(&head_of(1, &release)), 0).await, Err(WireError::Garbled(_))));
}

#[tokio::test]
async fn a_damaged_head_is_noticed_wherever_the_damage_is() {
    let mut outbox = Outbox::default();
    outbox.put_frame(&frame(vec![inputs(vec![tensors_of(&[3])])]), None).unwrap();
    let bytes = written(&mut outbox, 1 << 20);
    let end = bytes.len() - 3;
    for place in 4..end {
        for bit in 0..8 {
            let mut bytes = bytes.clone();
            bytes[place] ^= 1 << bit;
            assert!(matches!(read(&bytes, 11_000).await, Err(WireError::Damaged)), "{place} {bit}");
        }
    }
}

#[tokio::test]
async fn the_name_of_a_queue_has_a_bound() {
    let named = |model: usize, dimensions: usize| {
        let key = QueueKey { model: "m".repeat(model), version: 1, shape: vec![1; dimensions] };
        headed(&postcard::to_allocvec(&frame(vec![Message::Queue { alias: QueueAlias(1), key }])).unwrap())
    };
    assert!(read(&named(1024, 256), 0).await.is_ok());
    assert!(matches!(read(&named(1025, 1), 0).await, Err(WireError::Garbled(_))));
    assert!(matches!(read(&named(1, 257), 0).await, Err(WireError::Garbled(_))));
}

/// A frontend sends at most 512 requests in a message.
#[tokio::test]
async fn a_message_has_at_most_the_requests_that_a_frontend_sends() {
    let head = |count| headed(&postcard::to_allocvec(&frame(vec![Message::Cancel(vec![1; count])])).unwrap());
    assert!(read(&head(512), 0).await.is_ok());
    assert!(matches!(read(&head(513), 0).await, Err(WireError::Garbled(_))));
}

#[tokio::test]
async fn large_tensors_go_by_memory_and_frames_without_them_are_lost() {
    let (arena, peer) = both();
    let peer = PeerMemory::Mapped(peer);
    let (kept, elsewhere) = (Tensors::kept(tensors_of(&[100, 8000]), Some(&arena)), tensors_of(&[5000]));
    let sent = [frame(vec![inputs(vec![kept.clone(), elsewhere])]), frame(Vec::new())];
    let mut outbox = Outbox::default();
    assert_eq!(outbox.put_frame(&sent[0], Some(&arena)).unwrap(), [5100, 8000]);
    assert_eq!(outbox.put_frame(&sent[1], Some(&arena)).unwrap(), [0, 0]);
    let announced = outbox.bytes();
    let bytes = written(&mut outbox, 1 << 20);
    assert!(bytes.len() == announced && announced < 6000, "{announced}");
    let mut scratch = Vec::new();
    let mut read = async |most| {
        let mut reader = &bytes[..];
        let first = read_frame(&mut reader, &mut scratch, &ReadBudget::new(most), Some(&peer)).await;
        (first, read_frame(&mut reader, &mut scratch, &ReadBudget::new(most), Some(&peer)).await.ok().flatten())
    };
    let (first, second) = read(1 << 20).await;
    assert_eq!((first.unwrap().as_ref(), second.as_ref()), (Some(&sent[0]), Some(&sent[1])));
    assert!(matches!(read(13_000).await.0, Err(WireError::TooLarge { announced: 13_100, .. })), "memory counts");
    drop((kept, sent));
    let (first, second) = read(1 << 20).await;
    assert!(first.unwrap().is_none() && second.is_some(), "what comes after it is read");
}

#[tokio::test]
async fn a_tensor_beyond_the_memory_of_a_peer_ends_its_connection() {
    let (arena, peer) = both();
    let peer = PeerMemory::Mapped(peer);
    let kept = Tensors::kept(tensors_of(&[8000]), Some(&arena));
    let mut outbox = Outbox::default();
    outbox.put_frame(&frame(vec![inputs(vec![kept])]), Some(&arena)).unwrap();
    let mut bytes = written(&mut outbox, 1 << 20);
    let page = bytes.len() - 12;
    for beyond in [15, 16, u32::MAX] {
        bytes[page..page + 4].copy_from_slice(&beyond.to_le_bytes());
        let read = read_frame(&mut &bytes[..], &mut Vec::new(), &ReadBudget::new(1 << 20), Some(&peer)).await;
        assert!(matches!(read, Err(WireError::Outside(8000))), "{beyond}");
    }
}

/// Polls a future once.
fn is_pending(future: &mut (impl Future + Unpin)) -> bool {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop())).is_pending()
}

#[tokio::test]
async fn connections_of_one_address_share_a_budget() {
    let offers = |bytes| {
        let model = ServedModel { model: "m".into(), version: 1, definition: vec![0; bytes], may_repeat: true };
        let mut outbox = Outbox::default();
        outbox.put_frame(&frame(vec![Message::Models(vec![model])]), None).unwrap();
        written(&mut outbox, usize::MAX)
    };
    let (budget, other) = (ReadBudget::new(1 << 20), ReadBudget::new(1 << 20));
    let (large, small) = (offers(30 << 20), offers(1 << 10));
    let read = async |mut bytes: &[u8], budget| read_frame(&mut bytes, &mut Vec::new(), budget, None).await;
    // A head of 60 MiB is announced, and never comes.
    let (mut silent, mut half) = tokio::io::duplex(64);
    silent.write_all(&[(60u32 << 20).to_le_bytes(), [0; 4]].concat()).await.unwrap();
    let mut scratch = Vec::new();
    let mut holds = Box::pin(read_frame(&mut half, &mut scratch, &budget, None));
    assert!(is_pending(&mut holds));
    let mut waits = Box::pin(read(&large, &budget));
    assert!(is_pending(&mut waits), "it does not fit beside the announced one");
    assert!(read(&small, &budget).await.is_ok(), "small heads need no budget");
    assert!(read(&large, &other).await.is_ok(), "another address has another budget");
    drop(holds);
    assert!(waits.await.is_ok());
    // Tensors have their own budget: one frame of the most bytes, or several smaller ones.
    let tensors = |bytes: usize| {
        let mut outbox = Outbox::default();
        outbox.put_frame(&frame(vec![inputs(vec![tensors_of(&[bytes])])]), None).unwrap();
        written(&mut outbox, usize::MAX)
    };
    let whole = tensors(1 << 20);
    let (mut silent, mut half) = tokio::io::duplex(4096);
    silent.write_all(&whole[..1000]).await.unwrap();
    let mut scratch = Vec::new();
    let mut holds = Box::pin(read_frame(&mut half, &mut scratch, &budget, None));
    assert!(is_pending(&mut holds));
    let whole_too = tensors(1 << 20);
    let mut waits = Box::pin(read(&whole_too, &budget));
    assert!(is_pending(&mut waits));
    assert!(read(&tensors(60 << 10), &budget).await.is_ok());
    drop(holds);
    assert!(waits.await.is_ok());
}
