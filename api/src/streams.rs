//! Streams that stay open (event streams, terminals): how many one tenant may have on one process, and how many there are.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
};

use futures::Stream;
use towpath_chassis::{Error, Result, telemetry::limit_reached};
use towpath_schemas::{ErrorCode, id::TenantId, limit::STREAMS_PER_TENANT};

/// The open streams of this process.
#[derive(Debug, Clone, Default)]
pub struct Streams(Arc<Mutex<HashMap<TenantId, usize>>>);

/// The place of one stream, given back when this is dropped.
#[derive(Debug)]
pub struct Open {
    streams: Streams,
    tenant: TenantId,
}

impl Streams {
    /// Takes a place for one more.
    pub fn open(&self, tenant: TenantId) -> Result<Open> {
        let mut streams = self.lock();
        let open = streams.entry(tenant).or_default();
        if *open >= STREAMS_PER_TENANT {
            limit_reached("streams_per_tenant");
            return Err(Error::refused(
                ErrorCode::TooMany,
                format!("{STREAMS_PER_TENANT} event streams and terminals of this tenant are open here, which is the limit"),
            ));
        }
        *open += 1;
        Ok(Open { streams: self.clone(), tenant })
    }

    /// How many are open, of all tenants.
    pub fn count(&self) -> usize {
        self.lock().values().sum()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<TenantId, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let mut streams = self.streams.lock();
        if let Some(open) = streams.get_mut(&self.tenant) {
            *open -= 1;
            if *open == 0 {
                streams.remove(&self.tenant);
            }
        }
    }
}

/// A stream that keeps its place until it ends or is dropped.
pub struct Placed<S> {
    pub stream: Pin<Box<S>>,
    pub _place: Open,
}

impl<S: Stream> Stream for Placed<S> {
    type Item = S::Item;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.stream.as_mut().poll_next(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_s_places_run_out_and_come_back_and_another_s_do_not() {
        let streams = Streams::default();
        let (one, other) = (TenantId::mint(), TenantId::mint());
        let mut open: Vec<Open> = (0..STREAMS_PER_TENANT).map(|_| streams.open(one).expect("a place")).collect();
        assert!(matches!(streams.open(one), Err(Error::Refused(problem)) if problem.status == 429));
        drop(streams.open(other).expect("another tenant's"));
        open.pop();
        open.push(streams.open(one).expect("a place that was given back"));
        drop(open);
        assert_eq!((streams.count(), streams.lock().len()), (0, 0));
    }
}
