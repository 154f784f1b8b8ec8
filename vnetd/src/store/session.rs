//! One connection to the store: lease, reading, watch, writes.

use etcd_client::{
    Client, Compare, CompareOp, EventType, GetOptions, PutOptions, Txn, TxnOp, WatchOptions, WatchResponse,
};
use std::time::Duration;
use tokio::sync::watch::Receiver;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval};
use vnet_control::overlay::record::PREFIX;
use vnet_control::overlay::{Alarm, Write};

use super::{Agent, Host, LEASE, MESSAGE_MAX, PATIENCE_MAX, REQUEST, StoreError};

/// Keys in one page of a reading; a page whose values are too large is asked for again in smaller ones. For each page etcd
/// counts all keys behind it, so a reading in small pages costs the store the square of what it holds.
const PAGE_KEYS: i64 = 5000;
/// Writes in one transaction: half of what etcd takes (`--max-txn-ops`).
const WRITES_MAX: usize = 64;
/// Transactions under way.
const TRANSACTIONS_MAX: usize = 4;

impl<H: Host> Agent<H> {
    /// Works with the store until something goes wrong; `Ok` when it was to stop.
    pub(super) async fn session(&mut self, stop: &mut Receiver<bool>) -> Result<(), StoreError> {
        let connect = Client::connect(self.options.endpoints.clone(), Some(self.options.connect()));
        let mut client = tokio::select! {
            client = self.request(connect) => client?,
            _ = stop.changed() => return Ok(()),
        };
        let lease = tokio::select! {
            lease = self.renew_lease(&mut client) => lease?,
            _ = stop.changed() => return Ok(()),
        };
        self.find_address().await;
        let now_ms = self.now_ms();
        self.overlay.connected(lease, now_ms);
        let behind = self.overlay.in_step();
        tokio::select! {
            read = self.read(&client) => read?,
            _ = stop.changed() => return Ok(()),
        }
        if !behind {
            tracing::info!("overlay: in step with the store at revision {}", self.revision);
        }
        let ended = tokio::select! {
            ended = self.follow(&client, lease) => ended,
            _ = stop.changed() => Ok(()),
        };
        if ended.is_ok() {
            self.take_leave(client, lease).await;
        }
        ended
    }

    /// Keeps the lease of the session before, if it still lives.
    async fn renew_lease(&mut self, client: &mut Client) -> Result<i64, StoreError> {
        if self.lease != 0 {
            let left = self.request(client.lease_time_to_live(self.lease, None)).await?;
            if left.ttl() > 0 {
                self.request(client.lease_client().keep_alive(self.lease)).await?;
                self.kept = Instant::now();
                return Ok(self.lease);
            }
        }
        self.lease = self.request(client.lease_grant(LEASE.as_secs() as i64, None)).await?.id();
        self.kept = Instant::now();
        Ok(self.lease)
    }

    /// Renews the lease when a third of its time is over: a reading may take longer than it lasts.
    async fn keep_lease(&mut self, client: &Client) -> Result<(), StoreError> {
        if self.kept.elapsed() >= LEASE / 3 {
            self.request(client.lease_client().keep_alive(self.lease)).await?;
            self.kept = Instant::now();
        }
        Ok(())
    }

    /// Reads the whole store in one revision, page by page.
    async fn read(&mut self, client: &Client) -> Result<(), StoreError> {
        let mut kv = client.kv_client().max_decoding_message_size(MESSAGE_MAX);
        let end = prefix_end();
        let (mut from, mut revision, mut limit) = (PREFIX.as_bytes().to_vec(), 0, PAGE_KEYS);
        let mut slowest = Duration::ZERO;
        self.overlay.begin_reading();
        loop {
            self.keep_lease(client).await?;
            let asked = Instant::now();
            let options = GetOptions::new().with_range(end.clone()).with_limit(limit).with_revision(revision);
            let page = match self.request_within(self.patience, kv.get(from.clone(), Some(options))).await {
                Err(error) if is_too_large(&error) && limit > 1 => {
                    limit = (limit / 8).max(1);
                    continue;
                }
                Err(StoreError::Silent) => {
                    self.patience = (self.patience * 2).min(PATIENCE_MAX);
                    return Err(StoreError::Silent);
                }
                page => page?,
            };
            slowest = slowest.max(asked.elapsed());
            if revision == 0 {
                revision = page.header().map_or(0, |header| header.revision());
            }
            page.kvs().iter().for_each(|kv| self.put(kv));
            match page.kvs().last() {
                Some(last) if page.more() => from = [last.key(), &[0]].concat(),
                _ => break,
            }
            limit = (limit * 2).min(PAGE_KEYS);
        }
        self.patience = (slowest * 2).clamp(REQUEST, PATIENCE_MAX);
        self.revision = revision;
        self.end_reading();
        self.turn();
        Ok(())
    }

    /// Follows the store by a watch, writes what there is to write, and keeps the lease.
    async fn follow(&mut self, client: &Client, lease: i64) -> Result<(), StoreError> {
        let mut watching = client.watch_client().max_decoding_message_size(MESSAGE_MAX);
        let options =
            WatchOptions::new().with_prefix().with_start_revision(self.revision + 1).with_fragment();
        let mut watch = self.request(watching.watch(PREFIX, Some(options))).await?;
        let mut leases = client.lease_client();
        let (mut keeper, mut kept) = self.request(leases.keep_alive(lease)).await?;
        let mut alive = interval(LEASE / 3);
        alive.set_missed_tick_behavior(MissedTickBehavior::Delay);
        self.kept = Instant::now();
        let mut writing = JoinSet::new();
        // Not all at once, when many agents have started together.
        let spread = self.options.reread.mul_f64(0.5 + 0.5 * f64::from(self.lease as u8) / 255.0);
        let mut reread = Instant::now() + spread;
        loop {
            self.write(client, lease, &mut writing);
            tokio::select! {
                news = watch.message() => self.take_in(news?)?,
                Some(done) = writing.join_next() => self.written(done),
                answer = kept.message() => match answer? {
                    Some(answer) if answer.ttl() > 0 => self.kept = Instant::now(),
                    _ => return Err(StoreError::Lease),
                },
                _ = alive.tick() => {
                    if self.kept.elapsed() >= LEASE {
                        return Err(StoreError::Silent);
                    }
                    self.request(keeper.keep_alive()).await?;
                }
                _ = tokio::time::sleep_until(reread) => {
                    self.read(client).await?;
                    reread = Instant::now() + self.options.reread;
                    continue;
                }
                _ = self.ticks.tick() => {}
            }
            self.turn();
        }
    }

    /// Takes in what the watch tells.
    fn take_in(&mut self, news: Option<WatchResponse>) -> Result<(), StoreError> {
        let news = news.ok_or_else(|| StoreError::Watch("by the store".into()))?;
        if news.canceled() {
            let why = match news.compact_revision() {
                0 => news.cancel_reason().to_string(),
                revision => format!("what it wanted is compacted (revision {revision})"),
            };
            return Err(StoreError::Watch(why));
        }
        for event in news.events() {
            let Some(kv) = event.kv() else { continue };
            self.revision = self.revision.max(kv.mod_revision());
            match event.event_type() {
                EventType::Put => self.put(kv),
                EventType::Delete => self.delete(kv),
            }
        }
        Ok(())
    }

    /// Starts what there is to write.
    fn write(&mut self, client: &Client, lease: i64, writing: &mut JoinSet<Result<(), StoreError>>) {
        if writing.len() >= TRANSACTIONS_MAX {
            return;
        }
        let writes = self.overlay.writes(self.now_ms());
        let writes = self.signed(writes);
        for writes in writes.chunks(WRITES_MAX) {
            writing.spawn(commit(client.clone(), lease, writes.to_vec()));
        }
    }

    fn written(&mut self, done: Result<Result<(), StoreError>, tokio::task::JoinError>) {
        if let Ok(Err(error)) = done {
            let text = format!("the store does not take this host's records: {error}");
            self.overlay.alarm(Alarm::Write, self.now_ms(), text);
        }
    }

    /// Says that this host leaves. The lease runs out by itself: what vanished at once would not be seen to be withdrawn.
    async fn take_leave(&mut self, client: Client, lease: i64) {
        let farewell = self.overlay.farewell();
        if let Err(error) = commit(client, lease, self.signed(farewell)).await {
            tracing::warn!("overlay: the store was not told that this host leaves: {error}");
        }
    }
}

/// Makes writes as one transaction; when one of them is overtaken, each by itself. What is overtaken is decided anew when the
/// watch tells of it.
async fn commit(mut client: Client, lease: i64, writes: Vec<Write>) -> Result<(), StoreError> {
    if writes.is_empty() {
        return Ok(());
    }
    let all = transaction(&mut client, lease, &writes).await?;
    if !all && writes.len() > 1 {
        for write in writes.chunks(1) {
            transaction(&mut client, lease, write).await?;
        }
    }
    Ok(())
}

/// True when the transaction was made.
async fn transaction(client: &mut Client, lease: i64, writes: &[Write]) -> Result<bool, StoreError> {
    let unchanged = |write: &Write| Compare::mod_revision(write.key.clone(), CompareOp::Equal, write.expect);
    let operation = |write: &Write| match &write.value {
        Some(value) => {
            TxnOp::put(write.key.clone(), value.clone(), Some(PutOptions::new().with_lease(lease)))
        }
        None => TxnOp::delete(write.key.clone(), None),
    };
    let transaction = Txn::new()
        .when(writes.iter().map(unchanged).collect::<Vec<_>>())
        .and_then(writes.iter().map(operation).collect::<Vec<_>>());
    let done = tokio::time::timeout(REQUEST, client.txn(transaction)).await;
    Ok(done.map_err(|_| StoreError::Silent)??.succeeded())
}

/// The key behind all that begin with [`PREFIX`].
fn prefix_end() -> Vec<u8> {
    let mut end = PREFIX.as_bytes().to_vec();
    if let Some(last) = end.last_mut() {
        *last += 1;
    }
    end
}

/// True when an answer was larger than is taken.
fn is_too_large(error: &StoreError) -> bool {
    matches!(error, StoreError::Etcd(etcd_client::Error::GRpcStatus(status))
        if status.message().contains("too large") || status.message().contains("larger than max"))
}
